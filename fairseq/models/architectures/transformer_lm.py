"""The named sets of defaults of ``transformer_lm``: published systems, and small ones for the demo and tests."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq.config.registry import register_model_architecture
from fairseq.models.transformer_lm import TransformerLMConfig

# The defaults of fairseq's dataclass, which ``transformer_lm`` has from 0.12 on: post-norm, and a width of embeddings
# and output that does not follow --decoder-embed-dim. Up to 0.10.2 it had those of base_lm_architecture.
PLAIN: Mapping[str, Any] = {"decoder_normalize_before": False, "decoder_input_dim": 512, "decoder_output_dim": 512}


def set_defaults(args: argparse.Namespace, **values: Any) -> None:
    """Set those of *values* that *args* lacks."""
    for name, value in values.items():
        if not hasattr(args, name):
            setattr(args, name, value)


@register_model_architecture("transformer_lm", "transformer_lm")
def transformer_lm(args: argparse.Namespace) -> None:
    """fairseq's ``transformer_lm`` from 0.12 on."""
    set_defaults(args, **PLAIN)


def base_lm_architecture(args: argparse.Namespace) -> None:
    """What all other architectures of fairseq begin with: pre-norm, embeddings and output as wide as the model."""
    set_defaults(args, decoder_embed_dim=TransformerLMConfig.decoder_embed_dim, decoder_normalize_before=True)
    set_defaults(args, decoder_input_dim=args.decoder_embed_dim, decoder_output_dim=args.decoder_embed_dim)


def resumed(model: Any, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of ``transformer_lm`` up to 0.10.2 with which a run goes on from a checkpoint that has them.

    Args:
        model: settings of the run's model; those that are not the architecture's defaults stay.
        stored: settings of the checkpoint.
    """
    dim = getattr(model, "decoder_embed_dim", None)
    former = {"decoder_normalize_before": (True,), "decoder_input_dim": (dim, None), "decoder_output_dim": (dim, None)}
    defaults = [name for name, value in PLAIN.items() if getattr(model, name, None) == value]
    return {
        name: former[name][0]
        for name in defaults
        if name in stored and stored[name] in former[name] and former[name][0] != PLAIN[name]
    }


@register_model_architecture("transformer_lm", "transformer_lm_big")
def transformer_lm_big(args: argparse.Namespace) -> None:
    set_defaults(
        args, decoder_layers=12, decoder_embed_dim=1024, decoder_ffn_embed_dim=4096, decoder_attention_heads=16
    )
    base_lm_architecture(args)


@register_model_architecture("transformer_lm", "transformer_lm_wiki103")
@register_model_architecture("transformer_lm", "transformer_lm_baevski_wiki103")
def transformer_lm_baevski_wiki103(args: argparse.Namespace) -> None:
    """Baevski & Auli 2019, WikiText-103: 247 M parameters with its dictionary of 267,744 words."""
    set_defaults(
        args,
        decoder_layers=16,
        decoder_attention_heads=8,
        dropout=0.3,
        adaptive_input=True,
        tie_adaptive_weights=True,
        adaptive_input_cutoff=[20000, 60000],
        adaptive_softmax_cutoff=[20000, 60000],
        adaptive_softmax_dropout=0.2,
        attention_dropout=0.1,
        activation_dropout=0.1,
        no_decoder_final_norm=True,
        tie_adaptive_proj=True,
    )
    transformer_lm_big(args)


@register_model_architecture("transformer_lm", "transformer_lm_gbw")
@register_model_architecture("transformer_lm", "transformer_lm_baevski_gbw")
def transformer_lm_baevski_gbw(args: argparse.Namespace) -> None:
    """Baevski & Auli 2019, One Billion Word."""
    set_defaults(args, decoder_embed_dim=512, dropout=0.1, attention_dropout=0.1, no_decoder_final_norm=True)
    transformer_lm_big(args)


def _gpt(args: argparse.Namespace, layers: int, dim: int, heads: int, ffn: int | None = None) -> None:
    """fairseq's sizes of a model after GPT and GPT-2, with sinusoidal positions."""
    set_defaults(args, decoder_layers=layers, decoder_embed_dim=dim, decoder_attention_heads=heads)
    set_defaults(args, decoder_ffn_embed_dim=ffn or 4 * dim, dropout=0.1, attention_dropout=0.1, activation_fn="gelu")
    base_lm_architecture(args)


@register_model_architecture("transformer_lm", "transformer_lm_gpt")
def transformer_lm_gpt(args: argparse.Namespace) -> None:
    _gpt(args, 12, 768, 12)


@register_model_architecture("transformer_lm", "transformer_lm_gpt2_small")
def transformer_lm_gpt2_small(args: argparse.Namespace) -> None:
    """fairseq's model of this name: GPT-2's shape with 24 layers."""
    _gpt(args, 24, 1024, 16)


@register_model_architecture("transformer_lm", "transformer_lm_gpt2_tiny")
def transformer_lm_gpt2_tiny(args: argparse.Namespace) -> None:
    _gpt(args, 2, 64, 1, ffn=64)


@register_model_architecture("transformer_lm", "transformer_lm_gpt2_medium")
def transformer_lm_gpt2_medium(args: argparse.Namespace) -> None:
    _gpt(args, 36, 1280, 20)


@register_model_architecture("transformer_lm", "transformer_lm_gpt2_big")
def transformer_lm_gpt2_big(args: argparse.Namespace) -> None:
    _gpt(args, 48, 1600, 25)


@register_model_architecture("transformer_lm", "transformer_lm_gpt2_big_wide")
def transformer_lm_gpt2_big_wide(args: argparse.Namespace) -> None:
    _gpt(args, 24, 2048, 32)


@register_model_architecture("transformer_lm", "transformer_lm_gpt2_bigger")
def transformer_lm_gpt2_bigger(args: argparse.Namespace) -> None:
    _gpt(args, 48, 2048, 32)


GPT3 = {  # name: layers, width, heads
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (24, 1536, 16),
    "xl": (24, 2048, 32),
    "2_7": (32, 2560, 32),
    "6_7": (32, 4096, 32),
    "13": (40, 5120, 40),
    "175": (96, 12288, 96),
}


def _register_gpt3(name: str, layers: int, dim: int, heads: int) -> None:
    """Register fairseq's ``transformer_lm_gpt3_NAME`` (Brown et al. 2020, table 2.1; dense attention throughout)."""

    def fill(args: argparse.Namespace) -> None:
        set_defaults(args, decoder_learned_pos=True, share_decoder_input_output_embed=True)
        set_defaults(args, decoder_embed_dim=dim, dropout=0.0, attention_dropout=0.0)
        _gpt(args, layers, dim, heads, ffn=4 * args.decoder_embed_dim)

    register_model_architecture("transformer_lm", f"transformer_lm_gpt3_{name}")(fill)


for _name, _sizes in GPT3.items():
    _register_gpt3(_name, *_sizes)


def _cache_of_one_segment(args: argparse.Namespace) -> None:
    set_defaults(args, position_infused_attention=True)
    set_defaults(args, tokens_from_prev=getattr(args, "tokens_per_sample", TransformerLMConfig.tokens_per_sample))


@register_model_architecture("transformer_lm", "shortformer")
def shortformer(args: argparse.Namespace) -> None:
    """``transformer_lm`` of 0.9, pre-norm, with position-infused attention and a cache of one segment."""
    _cache_of_one_segment(args)
    base_lm_architecture(args)


@register_model_architecture("transformer_lm", "shortformer_wiki103")
def shortformer_wiki103(args: argparse.Namespace) -> None:
    """``transformer_lm_wiki103`` with position-infused attention and a cache of one segment."""
    _cache_of_one_segment(args)
    transformer_lm_baevski_wiki103(args)


def _small(args: argparse.Namespace, layers: int, dim: int, cutoffs: list[int]) -> None:
    set_defaults(
        args,
        decoder_layers=layers,
        decoder_embed_dim=dim,
        decoder_ffn_embed_dim=4 * dim,
        decoder_attention_heads=4,
        dropout=0.1,
        attention_dropout=0.0,
        activation_dropout=0.0,
        adaptive_softmax_dropout=0.1,
        adaptive_input_cutoff=cutoffs,
        adaptive_softmax_cutoff=cutoffs,
    )
    transformer_lm_baevski_wiki103(args)


@register_model_architecture("transformer_lm", "transformer_lm_demo")
def transformer_lm_demo(args: argparse.Namespace) -> None:
    """The baseline's design at 4 layers of width 256, for a corpus of a million words and a CPU."""
    _small(args, layers=4, dim=256, cutoffs=[1000, 4000])


@register_model_architecture("transformer_lm", "shortformer_demo")
def shortformer_demo(args: argparse.Namespace) -> None:
    """``transformer_lm_demo`` with position-infused attention and a cache of one segment."""
    _cache_of_one_segment(args)
    transformer_lm_demo(args)


@register_model_architecture("transformer_lm", "transformer_lm_tiny")
def transformer_lm_tiny(args: argparse.Namespace) -> None:
    """2 layers of width 64, for tests."""
    _small(args, layers=2, dim=64, cutoffs=[200, 600])


@register_model_architecture("transformer_lm", "shortformer_tiny")
def shortformer_tiny(args: argparse.Namespace) -> None:
    """2 layers of width 64 with position-infused attention and a cache of one segment, for tests."""
    _cache_of_one_segment(args)
    transformer_lm_tiny(args)
