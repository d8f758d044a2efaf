"""Layers of ``fairseq.modules``, with fairseq's constructors and names, for [T, B, C]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq.errors import UserError
from fairseq.modules.fairseq_modules import (
    FairseqDropout,
    LayerDropModuleList,
    LayerNorm,
    PositionalEmbedding,
    get_activation_fn,
    quant_noise,
)
from fairseq.modules.multihead_attention import MultiheadAttention
from fairseq.modules.transformer_config import TransformerConfig


class _Layer(nn.Module):
    """Self-attention and a feed-forward network, for [T, B, C]."""

    part = ""  # first word of the names of settings
    normalize_before = False
    self_attn: nn.Module

    def _make(self, dim: int, ffn_dim: int, dropout: float, activation_dropout: float, activation_fn: str) -> None:
        self.embed_dim = dim
        self.dropout_module, self.activation_dropout_module = (
            FairseqDropout(dropout),
            FairseqDropout(activation_dropout),
        )
        self.activation_fn = get_activation_fn(activation_fn)
        self.self_attn_layer_norm = LayerNorm(dim)
        self.fc1, self.fc2 = self.build_fc1(dim, ffn_dim, 0.0, 8), self.build_fc2(ffn_dim, dim, 0.0, 8)
        self.final_layer_norm = LayerNorm(dim)

    def _made_of(self, args: Any) -> None:
        """Make the layer of the flat settings of :attr:`part`."""
        cfg = TransformerConfig.from_namespace(args)
        self.args = self.cfg = cfg
        sizes = cfg[f"{self.part}_embed_dim"], cfg[f"{self.part}_ffn_embed_dim"]
        # `relu_dropout` is the former name.
        rates = cfg.dropout, cfg.activation_dropout or cfg.relu_dropout or 0.0
        self.normalize_before = cfg[f"{self.part}_normalize_before"]
        self.quant_noise, self.quant_noise_block_size = cfg.quant_noise_pq, cfg.quant_noise_pq_block_size
        # fairseq's order of parameters: the attention comes first.
        self.embed_dim = sizes[0]
        self.self_attn = self.build_self_attention(sizes[0], args)
        self._make(*sizes, *rates, cfg.activation_fn)

    def build_fc1(self, input_dim: int, output_dim: int, q_noise: float, qn_block_size: int) -> nn.Module:
        """The first linear layer of the network; plug-ins override it."""
        return quant_noise(nn.Linear(input_dim, output_dim), q_noise, qn_block_size)

    def build_fc2(self, input_dim: int, output_dim: int, q_noise: float, qn_block_size: int) -> nn.Module:
        """The second; plug-ins override it."""
        return quant_noise(nn.Linear(input_dim, output_dim), q_noise, qn_block_size)

    def build_self_attention(self, embed_dim: int, args: Any, **options: Any) -> nn.Module:
        """The attention; plug-ins override it."""
        cfg = TransformerConfig.from_namespace(args)
        heads, rate = cfg[f"{self.part}_attention_heads"], cfg.attention_dropout
        options = {"q_noise": cfg.quant_noise_pq, "qn_block_size": cfg.quant_noise_pq_block_size, **options}
        return MultiheadAttention(embed_dim, heads, dropout=rate, self_attention=True, **options)

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum of both; plug-ins override it."""
        return residual + x

    def _feed_forward(self, x: Tensor) -> Tensor:
        y = self.final_layer_norm(x) if self.normalize_before else x
        y = self.activation_dropout_module(self.activation_fn(self.fc1(y)))
        x = self.residual_connection(self.dropout_module(self.fc2(y)), x)
        return x if self.normalize_before else self.final_layer_norm(x)

    def _apply_to(self, x: Tensor, **attention: object) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights, of attention with the arguments *attention* and of the
        network."""
        y = self.self_attn_layer_norm(x) if self.normalize_before else x
        y, weights = self.self_attn(query=y, key=y, value=y, **attention)
        x = self.residual_connection(self.dropout_module(y), x)
        x = x if self.normalize_before else self.self_attn_layer_norm(x)
        return self._feed_forward(x), weights

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Rename the norms of fairseq before 0.6 in *state_dict*."""
        for number, norm in enumerate(("self_attn_layer_norm", "final_layer_norm")):
            for kind in ("weight", "bias"):
                if (value := state_dict.pop(f"{name}.layer_norms.{number}.{kind}", None)) is not None:
                    state_dict[f"{name}.{norm}.{kind}"] = value


class TransformerEncoderLayer(_Layer):
    """A layer of an encoder, made of the settings ``encoder_…``."""

    part = "encoder"

    def __init__(self, args: object, return_fc: bool = False) -> None:
        super().__init__()
        self.return_fc = return_fc
        self._made_of(args)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None) -> Any:
        """The output: [T, B, C]; true in *attn_mask* [T, T] is not read."""
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            # 0 and 1, as fairseq's callers give it; finite, so that a row of ones has a softmax.
            attn_mask = attn_mask.masked_fill(attn_mask.bool(), -1e8 if x.dtype == torch.float32 else -1e4)
        x, _ = self._apply_to(x, key_padding_mask=encoder_padding_mask, need_weights=False, attn_mask=attn_mask)
        return (x, None) if self.return_fc else x


class TransformerDecoderLayer(_Layer):
    """A layer of a decoder without attention to an encoder, whatever *no_encoder_attn* says; made
    of the settings ``decoder_…``."""

    part = "decoder"

    def __init__(
        self, args: object, no_encoder_attn: bool = False, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> None:
        super().__init__()
        self.added = {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
        self.need_attn = True
        self._made_of(args)

    def build_self_attention(  # type: ignore[override]
        self, embed_dim: int, args: object, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        """The attention; plug-ins override it."""
        added = {name: value for name, value in self.added.items() if value}
        return super().build_self_attention(embed_dim, args, **added)

    def forward(
        self,
        x: Tensor,
        encoder_out: None = None,
        encoder_padding_mask: None = None,
        incremental_state: object = None,
        prev_self_attn_state: object = None,
        prev_attn_state: None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, None]:
        """The output [T, B, C], None for the weights, and None for the state of incremental
        decoding."""
        if encoder_out is not None:
            raise UserError("TransformerDecoderLayer: encoder_out: attention to an encoder is not implemented")
        masks = {"key_padding_mask": self_attn_padding_mask, "attn_mask": self_attn_mask}
        return *self._apply_to(x, incremental_state=incremental_state, need_weights=False, **masks), None

    def make_generation_fast_(self, need_attn: bool = False, **options: object) -> None:
        self.need_attn = need_attn


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
        init_fn: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        if init_fn is not None:
            init_fn()
        self.embedding_dim = embedding_dim
        noise = {"q_noise": q_noise, "qn_block_size": qn_block_size}
        self.self_attn = self.build_self_attention(
            embedding_dim, num_attention_heads, dropout=attention_dropout, self_attention=True, **noise
        )
        self._make(embedding_dim, ffn_embedding_dim, dropout, activation_dropout, activation_fn)

    def build_self_attention(self, embed_dim: int, args: int, **options: Any) -> nn.Module:
        """The attention, of *args* heads; plug-ins override it."""
        return MultiheadAttention(embed_dim, args, **options)

    def forward(
        self, x: Tensor, self_attn_mask: Tensor | None = None, self_attn_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The output [T, B, C] and None, for the weights."""
        masks = {"key_padding_mask": self_attn_padding_mask, "attn_mask": self_attn_mask}
        return self._apply_to(x, need_weights=False, **masks)


def init_bert_params(module: nn.Module) -> None:
    """Draw the weights of linear layers and embeddings from N(0, 0.02²), biases 0; for
    ``module.apply``."""
    if isinstance(module, MultiheadAttention):
        projections: list[Any] = [module.q_proj, module.k_proj, module.v_proj]
        for part in projections:
            nn.init.normal_(part.weight, std=0.02)
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
        embed_scale: float | None = None,
        freeze_embeddings: bool = False,
        n_trans_layers_to_freeze: int = 0,
        export: bool = False,
        traceable: bool = False,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ) -> None:
        super().__init__()
        for name, value in (
            ("embed_scale", embed_scale),
            ("freeze_embeddings", freeze_embeddings),
            ("n_trans_layers_to_freeze", n_trans_layers_to_freeze),
            ("q_noise", q_noise),
        ):
            if value:
                raise UserError(f"TransformerSentenceEncoder: `{name}` {value} is not implemented; leave it out")
        self.padding_idx, self.vocab_size = padding_idx, vocab_size
        self.embedding_dim, self.dropout_module = embedding_dim, FairseqDropout(dropout)
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
        **unused: object,
    ) -> tuple[list[Tensor], Tensor]:
        """Hidden states [T, B, C] of embeddings and layers, or the last ones; and of the first
        token [B, C]."""
        padding = tokens.eq(self.padding_idx)
        x = self.embed_tokens(tokens)  # (B, T, C)
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens, positions=positions)
        if self.segment_embeddings is not None and segment_labels is not None:
            x = x + self.segment_embeddings(segment_labels)
        x = x if self.emb_layer_norm is None else self.emb_layer_norm(x)
        x = self.dropout_module(x).masked_fill(padding[..., None], 0.0).transpose(0, 1)  # (T, B, C)
        states = [x]
        for layer in self.layers:
            x, _ = layer(x, self_attn_padding_mask=padding)
            states.append(x)
        return states[-1:] if last_state_only else states, x[0]
