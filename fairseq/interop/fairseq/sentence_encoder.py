"""Attention and encoder layers of ``fairseq.modules``, with fairseq's constructors and names, for [T, B, C]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.interop.fairseq.modules import LayerDropModuleList, LayerNorm, PositionalEmbedding
from fairseq.interop.fairseq.utils import get_activation_fn
from fairseq.modules.dropout import dropout


class MultiheadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, §3.2.2) without incremental state.

    Raises:
        NotImplementedError: ``add_bias_kv``, ``add_zero_attn`` or quantisation noise is asked for.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        **unused: Any,
    ) -> None:
        super().__init__()
        if add_bias_kv or add_zero_attn or q_noise:
            raise NotImplementedError("MultiheadAttention: add_bias_kv, add_zero_attn, q_noise; leave them out")
        self.embed_dim, self.num_heads, self.head_dim, self.p = embed_dim, num_heads, embed_dim // num_heads, dropout
        self.self_attention, self.encoder_decoder_attention = self_attention, encoder_decoder_attention
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        for part in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(part.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if bias:
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: Any = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [T, B, C] and the weights: [B, T, S], or [H, B, T, S] of each head.

        Args:
            query, key, value: [T, B, C], [S, B, C], [S, B, C]; without key and value the query.
            key_padding_mask: true at padding, [B, S].
            attn_mask: added to the scores, or bool and true where attention may not read: [T, S].
        """
        if incremental_state is not None or before_softmax:
            raise NotImplementedError("MultiheadAttention: incremental_state, before_softmax")
        key = query if key is None else key
        q, k, v = self.q_proj(query) * self.scaling, self.k_proj(key), self.v_proj(key if value is None else value)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))  # (B, H, T or S, D)
        scores = q @ k.transpose(-1, -2)  # (B, H, T, S)
        if attn_mask is not None:
            masked = scores.masked_fill(attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else None
            scores = scores + attn_mask if masked is None else masked
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None].bool(), -torch.inf)
        weights = F.softmax(scores, -1, dtype=torch.float32)
        output = dropout(weights.type_as(v), self.p, self.training) @ v  # (B, H, T, D)
        output = self.out_proj(output.permute(2, 0, 1, 3).flatten(2))  # (T, B, C)
        if not need_weights and not need_head_weights:
            return output, None
        return output, weights.transpose(0, 1) if need_head_weights else weights.mean(1)


class TransformerSentenceEncoderLayer(nn.Module):
    """A post-norm layer of BERT's encoder."""

    def __init__(
        self,
        embedding_dim: int = 768,
        ffn_embedding_dim: int = 3072,
        num_attention_heads: int = 8,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.1,
        activation_fn: str = "relu",
        export: bool = False,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        if init_fn is not None:
            init_fn()
        self.embedding_dim, self.dropout, self.activation_dropout = embedding_dim, dropout, activation_dropout
        self.activation_fn = get_activation_fn(activation_fn)
        self.self_attn = self.build_self_attention(
            embedding_dim,
            num_attention_heads,
            dropout=attention_dropout,
            self_attention=True,
            q_noise=q_noise,
            qn_block_size=qn_block_size,
        )
        self.self_attn_layer_norm = LayerNorm(embedding_dim)
        self.fc1, self.fc2 = nn.Linear(embedding_dim, ffn_embedding_dim), nn.Linear(ffn_embedding_dim, embedding_dim)
        self.final_layer_norm = LayerNorm(embedding_dim)

    def build_self_attention(self, embed_dim: int, num_attention_heads: int, **options: Any) -> nn.Module:
        """The attention; plug-ins override it."""
        return MultiheadAttention(embed_dim, num_attention_heads, **options)

    def forward(
        self, x: Tensor, self_attn_mask: Tensor | None = None, self_attn_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The output [T, B, C] and None, for the weights."""
        y, weights = self.self_attn(
            query=x,
            key=x,
            value=x,
            key_padding_mask=self_attn_padding_mask,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        x = self.self_attn_layer_norm(x + dropout(y, self.dropout, self.training))
        y = dropout(self.activation_fn(self.fc1(x)), self.activation_dropout, self.training)
        return self.final_layer_norm(x + dropout(self.fc2(y), self.dropout, self.training)), weights


def init_bert_params(module: nn.Module) -> None:
    """Draw the weights of linear layers and embeddings from N(0, 0.02²), biases 0; for ``module.apply``."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])


class TransformerSentenceEncoder(nn.Module):
    """BERT's encoder: embeddings of tokens, positions and segments, and post-norm layers.

    Args:
        embedding_dim: channels C.
        num_segments: kinds of tokens with an embedding each; 0: none.
        encoder_normalize_before: a layer norm after the embeddings.
        apply_bert_init: see :func:`init_bert_params`.
    """

    def __init__(
        self,
        padding_idx: int,
        vocab_size: int,
        num_encoder_layers: int = 6,
        embedding_dim: int = 768,
        ffn_embedding_dim: int = 3072,
        num_attention_heads: int = 8,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.1,
        layerdrop: float = 0.0,
        max_seq_len: int = 256,
        num_segments: int = 2,
        use_position_embeddings: bool = True,
        offset_positions_by_padding: bool = True,
        encoder_normalize_before: bool = False,
        apply_bert_init: bool = False,
        activation_fn: str = "relu",
        learned_pos_embedding: bool = True,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.padding_idx, self.vocab_size, self.embedding_dim, self.dropout = (
            padding_idx,
            vocab_size,
            embedding_dim,
            dropout,
        )
        self.embed_tokens = self.build_embedding(vocab_size, embedding_dim, padding_idx)
        self.segment_embeddings = nn.Embedding(num_segments, embedding_dim) if num_segments else None
        offset = padding_idx if offset_positions_by_padding else -1
        positions = PositionalEmbedding(max_seq_len, embedding_dim, offset, learned_pos_embedding)
        self.embed_positions = positions if use_position_embeddings else None
        self.emb_layer_norm = LayerNorm(embedding_dim) if encoder_normalize_before else None
        rates = {
            "dropout": dropout,
            "attention_dropout": attention_dropout,
            "activation_dropout": activation_dropout,
            "activation_fn": activation_fn,
        }
        sizes = (embedding_dim, ffn_embedding_dim, num_attention_heads)
        layers = (self.build_transformer_sentence_encoder_layer(*sizes, **rates) for _ in range(num_encoder_layers))
        self.layers = LayerDropModuleList(layerdrop, layers)
        if apply_bert_init:
            self.apply(init_bert_params)

    def build_embedding(self, vocab_size: int, embedding_dim: int, padding_idx: int) -> nn.Embedding:
        """The embeddings of tokens; plug-ins override it."""
        return nn.Embedding(vocab_size, embedding_dim, padding_idx)

    def build_transformer_sentence_encoder_layer(self, *sizes: Any, **rates: Any) -> nn.Module:
        """A layer; plug-ins override it."""
        return TransformerSentenceEncoderLayer(*sizes, **rates)

    def forward(
        self,
        tokens: Tensor,
        segment_labels: Tensor | None = None,
        last_state_only: bool = False,
        positions: Tensor | None = None,
        **unused: Any,
    ) -> tuple[list[Tensor], Tensor]:
        """Hidden states [T, B, C] of embeddings and layers, or the last ones; and of the first token [B, C]."""
        padding = tokens.eq(self.padding_idx)
        x = self.embed_tokens(tokens)  # (B, T, C)
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens, positions=positions)
        if self.segment_embeddings is not None and segment_labels is not None:
            x = x + self.segment_embeddings(segment_labels)
        x = x if self.emb_layer_norm is None else self.emb_layer_norm(x)
        x = dropout(x, self.dropout, self.training).masked_fill(padding[..., None], 0.0).transpose(0, 1)  # (T, B, C)
        states = [x]
        for layer in self.layers:
            x, _ = layer(x, self_attn_padding_mask=padding)
            states.append(x)
        return states[-1:] if last_state_only else states, x[0]
