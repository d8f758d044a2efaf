"""The named sets of defaults of ``electra``: published systems, and a small one."""

from __future__ import annotations

import argparse

from fairseq.config.registry import register_model_architecture
from fairseq.models.architectures.bert import encoder_sizes
from fairseq.models.architectures.transformer_lm import set_defaults


@register_model_architecture("electra", "electra")
@register_model_architecture("electra", "electra_base")
def electra_base(args: argparse.Namespace) -> None:
    """Clark et al. 2020, table 6: the sizes of BERT-base, a generator of a third of its width."""
    set_defaults(args, token_types=2, layer_norm_eps=1e-12, generator_size=1 / 3)
    encoder_sizes(args, layers=12, dim=768, heads=12)


@register_model_architecture("electra", "electra_discriminator")
def electra_discriminator(args: argparse.Namespace) -> None:
    """A finished discriminator: ELECTRA without generator."""
    set_defaults(args, generator_size=0.0)
    electra_base(args)


@register_model_architecture("bert", "electra_generator")
def electra_generator(args: argparse.Namespace) -> None:
    """A generator alone: an encoder with a masked language model's output layer."""
    set_defaults(args, token_types=2, layer_norm_eps=1e-12, encoder_input_dim=768)
    encoder_sizes(args, layers=12, dim=256, heads=4)


@register_model_architecture("electra", "electra_small")
def electra_small(args: argparse.Namespace) -> None:
    """Clark et al. 2020, table 6: 14 M parameters, embeddings of width 128, a generator of a quarter of its width."""
    set_defaults(args, encoder_input_dim=128, generator_size=0.25)
    encoder_sizes(args, layers=12, dim=256, heads=4)
    electra_base(args)


@register_model_architecture("electra", "electra_tiny")
def electra_tiny(args: argparse.Namespace) -> None:
    """2 layers of width 128, a generator of half that width."""
    set_defaults(args, generator_size=0.5)
    encoder_sizes(args, layers=2, dim=128, heads=2)
    electra_base(args)
