"""Attention and layers of ``fairseq.modules``, with fairseq's constructors and names, for [T, B, C]."""

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
    """Multi-head attention (Vaswani et al. 2017, §3.2.2) without incremental state, for [T, B, C].

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
        # Order k, v, q, out: checkpoints of fairseq number the optimizer's state by the order of the parameters.
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)
        for part in (self.k_proj, self.v_proj, self.q_proj):
            # As if the three were one matrix [3 C, C], whose Xavier bound is smaller by √2: √(6 / (C + 3 C)).
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
        if key_padding_mask is not None and attn_mask is not None and attn_mask.dtype != torch.bool:
            # torch wants both masks of one type
            padding = torch.zeros_like(key_padding_mask, dtype=attn_mask.dtype)
            key_padding_mask = padding.masked_fill(key_padding_mask.bool(), -torch.inf)
        projections = self.q_proj, self.k_proj, self.v_proj
        output, weights = F.multi_head_attention_forward(
            *(query, key, key if value is None else value, self.embed_dim, self.num_heads),
            in_proj_weight=None,
            in_proj_bias=None if self.q_proj.bias is None else torch.cat([part.bias for part in projections]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=self.p,
            out_proj_weight=self.out_proj.weight,
            out_proj_bias=self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights or need_head_weights,
            attn_mask=attn_mask,
            # Three matrices under three names, as checkpoints have them, where torch's own module has one.
            use_separate_proj_weight=True,
            q_proj_weight=self.q_proj.weight,
            k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight,
            average_attn_weights=not need_head_weights,
        )
        # torch has rows first, [B, H, T, S]; fairseq heads first.
        return output, weights.transpose(0, 1) if weights is not None and need_head_weights else weights


class _Layer(nn.Module):
    """Self-attention and a feed-forward network, for [T, B, C]."""

    part = ""  # first word of the names of settings
    normalize_before = False
    self_attn: nn.Module

    def _make(self, dim: int, ffn_dim: int, dropout: float, activation_dropout: float, activation_fn: str) -> None:
        self.embedding_dim = self.embed_dim = dim
        self.dropout, self.activation_dropout = dropout, activation_dropout
        self.activation_fn = get_activation_fn(activation_fn)
        self.self_attn_layer_norm = LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.final_layer_norm = LayerNorm(dim)

    def _made_of(self, args: Any) -> None:
        """Make the layer of the flat settings of :attr:`part`."""
        dim, ffn_dim = (getattr(args, f"{self.part}_{name}") for name in ("embed_dim", "ffn_embed_dim"))
        # `relu_dropout` is the former name.
        rates = args.dropout, getattr(args, "activation_dropout", 0.0) or getattr(args, "relu_dropout", 0.0)
        self._make(dim, ffn_dim, *rates, getattr(args, "activation_fn", "relu"))
        self.normalize_before = getattr(args, f"{self.part}_normalize_before", False)
        self.self_attn = self.build_self_attention(dim, args)

    def build_self_attention(self, embed_dim: int, args: Any, **options: Any) -> nn.Module:
        """The attention; plug-ins override it."""
        heads = getattr(args, f"{self.part}_attention_heads")
        return MultiheadAttention(embed_dim, heads, dropout=args.attention_dropout, self_attention=True)

    def _apply_to(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = self.self_attn_layer_norm(x) if self.normalize_before else x
        y, weights = self.self_attn(
            query=y, key=y, value=y, key_padding_mask=padding, need_weights=False, attn_mask=mask
        )
        x = x + dropout(y, self.dropout, self.training)
        x = x if self.normalize_before else self.self_attn_layer_norm(x)
        y = self.final_layer_norm(x) if self.normalize_before else x
        y = dropout(self.activation_fn(self.fc1(y)), self.activation_dropout, self.training)
        x = x + dropout(self.fc2(y), self.dropout, self.training)
        return x if self.normalize_before else self.final_layer_norm(x), weights


class TransformerEncoderLayer(_Layer):
    """A layer of an encoder, made of the settings ``encoder_…``."""

    part = "encoder"

    def __init__(self, args: Any, return_fc: bool = False) -> None:
        super().__init__()
        self._made_of(args)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None) -> Tensor:
        """The output: [T, B, C]."""
        return self._apply_to(x, attn_mask, encoder_padding_mask)[0]


class TransformerDecoderLayer(_Layer):
    """A layer of a decoder without attention to an encoder, made of the settings ``decoder_…``."""

    part = "decoder"

    def __init__(self, args: Any, no_encoder_attn: bool = True, **unused: Any) -> None:
        super().__init__()
        self._made_of(args)

    def forward(
        self,
        x: Tensor,
        encoder_out: None = None,
        encoder_padding_mask: None = None,
        incremental_state: None = None,
        prev_self_attn_state: None = None,
        prev_attn_state: None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """The output [T, B, C], None for the weights, and None for the state of incremental decoding."""
        if encoder_out is not None or incremental_state is not None:
            raise NotImplementedError("TransformerDecoderLayer: encoder_out, incremental_state")
        return *self._apply_to(x, self_attn_mask, self_attn_padding_mask), None


class TransformerSentenceEncoderLayer(_Layer):
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
        self._make(embedding_dim, ffn_embedding_dim, dropout, activation_dropout, activation_fn)
        noise = {"q_noise": q_noise, "qn_block_size": qn_block_size}
        self.self_attn = self.build_self_attention(
            embedding_dim, num_attention_heads, dropout=attention_dropout, self_attention=True, **noise
        )

    def build_self_attention(self, embed_dim: int, args: int, **options: Any) -> nn.Module:
        """The attention, of *args* heads; plug-ins override it."""
        return MultiheadAttention(embed_dim, args, **options)

    def forward(
        self, x: Tensor, self_attn_mask: Tensor | None = None, self_attn_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The output [T, B, C] and None, for the weights."""
        return self._apply_to(x, self_attn_mask, self_attn_padding_mask)


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

    *encoder_normalize_before* is a layer norm after the embeddings.
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
        self.padding_idx, self.vocab_size = padding_idx, vocab_size
        self.embedding_dim, self.dropout = embedding_dim, dropout
        self.embed_tokens = self.build_embedding(vocab_size, embedding_dim, padding_idx)
        self.segment_embeddings = nn.Embedding(num_segments, embedding_dim) if num_segments else None
        # `PositionalEmbedding` numbers positions from `padding_idx` + 1: −1 begins at 0.
        offset = padding_idx if offset_positions_by_padding else -1
        positions = PositionalEmbedding(max_seq_len, embedding_dim, offset, learned_pos_embedding)
        self.embed_positions = positions if use_position_embeddings else None
        self.emb_layer_norm = LayerNorm(embedding_dim) if encoder_normalize_before else None
        sizes = (embedding_dim, ffn_embedding_dim, num_attention_heads)
        rates = {"dropout": dropout, "attention_dropout": attention_dropout, "activation_dropout": activation_dropout}
        options = {**rates, "activation_fn": activation_fn}
        layers = (self.build_transformer_sentence_encoder_layer(*sizes, **options) for _ in range(num_encoder_layers))
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
