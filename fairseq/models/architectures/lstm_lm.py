"""The named sets of defaults of ``lstm_lm``."""

from __future__ import annotations

import argparse

from fairseq.config.registry import register_model_architecture
from fairseq.models.architectures.transformer_lm import set_defaults


@register_model_architecture("lstm_lm", "lstm_lm")
def lstm_lm(args: argparse.Namespace) -> None:
    """fairseq's defaults; its adaptive softmax goes with ``--criterion adaptive_loss`` alone."""
    if getattr(args, "criterion", None) == "adaptive_loss":
        set_defaults(args, adaptive_softmax_cutoff=[10000, 50000, 200000])
    else:
        args.adaptive_softmax_cutoff = None


@register_model_architecture("lstm_lm", "lstm_lm_tiny")
def lstm_lm_tiny(args: argparse.Namespace) -> None:
    """2 layers of width 32, for tests."""
    set_defaults(args, decoder_embed_dim=32, decoder_out_embed_dim=32, decoder_layers=2)
    if getattr(args, "criterion", None) == "adaptive_loss":
        set_defaults(args, adaptive_softmax_cutoff=[200, 600])
    lstm_lm(args)
