"""The parts of a transformer language model: embeddings, layers and projections, made from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.attention import PositionInfusedAttention, SelfAttention
from fairseq.modules.transformer_layer import TransformerLayer

if TYPE_CHECKING:
    from fairseq.models.transformer_lm import TransformerLMConfig


def embeddings(cfg: TransformerLMConfig, vocabulary: int, padding_idx: int | None, dim: int) -> nn.Module:
    """The input embeddings, adaptive or plain, *dim* wide."""
    if cfg.adaptive_input:
        return AdaptiveInput(
            vocabulary,
            padding_idx,
            dim,
            cfg.adaptive_input_factor,
            cfg.decoder_embed_dim,
            cfg.adaptive_input_cutoff or [],
        )
    embedding = nn.Embedding(vocabulary, dim, padding_idx)
    nn.init.normal_(embedding.weight, std=dim**-0.5)
    if padding_idx is not None:
        nn.init.zeros_(embedding.weight[padding_idx])
    return embedding


def layer(cfg: TransformerLMConfig, infused: bool, apex: bool) -> TransformerLayer:
    """A layer with its attention."""
    attention = (PositionInfusedAttention if infused else SelfAttention)(
        cfg.decoder_embed_dim, cfg.decoder_attention_heads, cfg.attention_dropout
    )
    return TransformerLayer(
        attention,
        cfg.decoder_embed_dim,
        cfg.decoder_ffn_embed_dim,
        dropout=cfg.dropout,
        activation_dropout=cfg.activation_dropout,
        activation_fn=cfg.activation_fn,
        normalize_before=cfg.decoder_normalize_before,
        apex=apex,
    )


def projection(inputs: int, outputs: int) -> nn.Linear:
    """A linear map between widths."""
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(linear.weight)
    return linear
