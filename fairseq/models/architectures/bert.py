"""The named sets of defaults of ``bert``: published systems, and small ones."""

from __future__ import annotations

import argparse

from fairseq.config.registry import register_model_architecture
from fairseq.models.architectures.transformer_lm import set_defaults


def encoder_sizes(args: argparse.Namespace, layers: int, dim: int, heads: int, ffn_dim: int | None = None) -> None:
    """Set the sizes that *args* lacks; the feed-forward networks are 4 · *dim* wide where nothing else is said."""
    set_defaults(
        args,
        encoder_layers=layers,
        encoder_embed_dim=dim,
        encoder_attention_heads=heads,
        encoder_ffn_embed_dim=ffn_dim or 4 * dim,
    )


@register_model_architecture("bert", "bert")
@register_model_architecture("bert", "bert_base")
def bert_base(args: argparse.Namespace) -> None:
    """Devlin et al. 2019: 110 M parameters with 30,522 symbols."""
    set_defaults(args, token_types=2, layer_norm_eps=1e-12)
    encoder_sizes(args, layers=12, dim=768, heads=12)


@register_model_architecture("bert", "bert_small")
def bert_small(args: argparse.Namespace) -> None:
    """BERT-Small of Turc et al. 2019: 4 layers of width 512."""
    encoder_sizes(args, layers=4, dim=512, heads=8)
    bert_base(args)


@register_model_architecture("bert", "bert_tiny")
def bert_tiny(args: argparse.Namespace) -> None:
    """BERT-Tiny of Turc et al. 2019: 2 layers of width 128."""
    encoder_sizes(args, layers=2, dim=128, heads=2)
    bert_base(args)


@register_model_architecture("bert", "roberta")
@register_model_architecture("bert", "roberta_base")
def roberta_base(args: argparse.Namespace) -> None:
    """Liu et al. 2019: the sizes of BERT-base, no token types."""
    encoder_sizes(args, layers=12, dim=768, heads=12)


@register_model_architecture("bert", "roberta_large")
def roberta_large(args: argparse.Namespace) -> None:
    """Liu et al. 2019: the sizes of BERT-large, no token types."""
    encoder_sizes(args, layers=24, dim=1024, heads=16)
