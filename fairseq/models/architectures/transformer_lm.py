"""The named sets of defaults of ``transformer_lm``:
published systems, and small ones for the demo and tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.models.transformer_lm_settings import TransformerLMConfig

Defaults = Mapping[str, Any]

# The defaults of fairseq's dataclass, which ``transformer_lm`` has from 0.12 on: post-norm, and a
# width of embeddings and output that does not follow --decoder-embed-dim. Up to 0.10.2 it had BASE.
PLAIN: Defaults = {"decoder_normalize_before": False, "decoder_input_dim": 512, "decoder_output_dim": 512}


# Of small models, whose few thousand words are all learned: with narrower bands, which were made
# for 267,744 words, they lose 0.03 bits per byte (benchmarks/results/small.md).
ONE_WIDTH: Defaults = {"adaptive_input_factor": 1.0, "adaptive_softmax_factor": 1.0}


def resumed(arch: str, model: object, stored: Mapping[str, object]) -> dict[str, object]:
    """The former defaults of *arch* with which a run goes on from a checkpoint that has them: those
    of ``transformer_lm`` in fairseq up to 0.10.2, and of the small architectures up to 2.0.

    They are among its settings *stored*; settings of *model* that are not the architecture's
    defaults stay.
    """
    if arch == "transformer_lm":
        widths = (getattr(model, "decoder_embed_dim", None), None)
        defaults = PLAIN
        former = {"decoder_normalize_before": (True,), "decoder_input_dim": widths, "decoder_output_dim": widths}
    elif arch in SMALL:
        defaults = {**ONE_WIDTH, **(NOTES if arch == "transformer_lm_fast_demo" else {})}
        former = {**dict.fromkeys(ONE_WIDTH, (4.0,)), "ngram_notes": (0,)}
    else:
        return {}
    # Only what is the architecture's default: a value of the user's own is never replaced.
    return {
        name: former[name][0]
        for name, default in defaults.items()
        if getattr(model, name, None) == default
        and name in stored
        and stored[name] in former[name]
        and former[name][0] != default
    }


def _width(settings: Defaults) -> int:
    return settings["decoder_embed_dim"]


def _dial_width(settings: Defaults) -> int:
    return settings.get("decoder_embed_dim") or dial_width(settings["decoder_layers"])


def dial_width(layers: int) -> int:
    """The width of ``transformer_lm_fast`` with so many layers."""
    return 64 * layers


def _sizes(layers: int, dim: int, heads: int, ffn: int | None = None) -> dict[str, object]:
    sizes = {"decoder_layers": layers, "decoder_embed_dim": dim, "decoder_attention_heads": heads}
    return {**sizes, "decoder_ffn_embed_dim": ffn or 4 * dim}


def _gpt(layers: int, dim: int, heads: int, ffn: int | None = None) -> dict[str, object]:
    """fairseq's sizes of a model after GPT and GPT-2, with sinusoidal positions."""
    others = {"dropout": 0.1, "attention_dropout": 0.1, "activation_fn": "gelu"}
    return {**BASE, **_sizes(layers, dim, heads, ffn), **others}


def _gpt3(layers: int, dim: int, heads: int) -> dict[str, object]:
    """fairseq's ``transformer_lm_gpt3_…`` (Brown et al.
    2020, table 2.1; dense attention throughout)."""
    return {
        **_gpt(layers, dim, heads),
        "decoder_ffn_embed_dim": lambda settings: 4 * settings["decoder_embed_dim"],
        "decoder_learned_pos": True,
        "share_decoder_input_output_embed": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _gpt2(layers: int, dim: int, heads: int) -> dict[str, object]:
    """GPT-2 as published (Radford et al. 2019),
    where fairseq's has sinusoids and an output of its own."""
    others = {"activation_fn": "gelu_accurate", "decoder_learned_pos": True, "share_decoder_input_output_embed": True}
    return {**_gpt(layers, dim, heads), **others, "no_scale_embedding": True}


def _llama(layers: int, dim: int, heads: int, kv_heads: int, ffn: int, tied: bool = True) -> dict[str, object]:
    """Llama (Touvron et al. 2023), with the shared heads of keys and values of Llama 2 (§2.2)."""
    return {
        **BASE,
        **_sizes(layers, dim, heads, ffn),
        "decoder_kv_heads": kv_heads,
        "rotary_fraction": 1.0,
        "decoder_norm": "rms",
        "decoder_gated_ffn": True,
        "activation_fn": "silu",
        "decoder_biases": "none",
        "no_scale_embedding": True,
        "share_decoder_input_output_embed": tied,
        "dropout": 0.0,
    }


def _pythia(layers: int, dim: int, heads: int) -> dict[str, object]:
    """Pythia (Biderman et al. 2023, table 1), as GPT-NeoX (Black et al. 2022, §2.1)."""
    return {
        **BASE,
        **_sizes(layers, dim, heads),
        "rotary_fraction": 0.25,
        "decoder_parallel_residual": True,
        "activation_fn": "gelu",
        "no_scale_embedding": True,
        "dropout": 0.0,
    }


def _small(layers: int, dim: int, cutoffs: list[int]) -> dict[str, object]:
    """The baseline's design in a small size, with smaller initial embeddings."""
    return {
        **WIKI103,
        **_sizes(layers, dim, 4),
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "adaptive_softmax_dropout": 0.1,
        "adaptive_input_cutoff": cutoffs,
        "adaptive_softmax_cutoff": cutoffs,
        **ONE_WIDTH,
        # Tied, the published values let each word predict itself: the loss would start 3 to 4 bits
        # above log₂ of the dictionary's size.
        "embed_init_std": 0.02,
    }


# What all other architectures of fairseq begin with:
# pre-norm, embeddings and output as wide as the model.
BASE: Defaults = {
    "decoder_embed_dim": TransformerLMConfig.decoder_embed_dim,
    "decoder_normalize_before": True,
    "decoder_input_dim": _width,
    "decoder_output_dim": _width,
}
BIG: Defaults = {**BASE, **_sizes(12, 1024, 16)}
WIKI103: Defaults = {  # Baevski & Auli 2019: 247 M parameters with WikiText-103's dictionary of 267,744 words
    **BIG,
    "decoder_layers": 16,
    "decoder_attention_heads": 8,
    "dropout": 0.3,
    "adaptive_input": True,
    "tie_adaptive_weights": True,
    "adaptive_input_cutoff": [20000, 60000],
    "adaptive_softmax_cutoff": [20000, 60000],
    "adaptive_softmax_dropout": 0.2,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "no_decoder_final_norm": True,
    "tie_adaptive_proj": True,
}
GBW: Defaults = {  # Baevski & Auli 2019, One Billion Word
    **BIG,
    "decoder_embed_dim": 512,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "no_decoder_final_norm": True,
}
SHORTFORMER: Defaults = {  # position-infused attention and a cache of one segment
    "position_infused_attention": True,
    # As long as a block, as in the paper's models; computed, so that it follows `tokens_per_sample`
    # of the command line.
    "tokens_from_prev": lambda settings: settings.get("tokens_per_sample", TransformerLMConfig.tokens_per_sample),
}
FAST: Defaults = {  # benchmarks/results/README.md, "Time to a perplexity"
    "token_shift": 2,
    "zero_init_residual": True,
    "activation_fn": "relu_squared",
    "embed_init_std": 0.02,
}
DIAL: Defaults = {  # one number, the layers, and the sizes that follow; 4 layers are those of the demo
    "decoder_embed_dim": lambda settings: _dial_width(settings),
    "decoder_input_dim": lambda settings: _dial_width(settings),
    "decoder_output_dim": lambda settings: _dial_width(settings),
    "decoder_ffn_embed_dim": lambda settings: 4 * _dial_width(settings),
    "decoder_attention_heads": lambda settings: max(1, _dial_width(settings) // 64),
}
NOTES: Defaults = {"ngram_notes": 64000}  # benchmarks/results/small.md, "Notes of pairs"
DEMO = _small(4, 256, [1000, 4000])  # for a corpus of a million words and a CPU
TINY = _small(2, 64, [200, 600])  # for tests

TRANSFORMER_LM: dict[str, Defaults] = {
    "transformer_lm": PLAIN,
    "transformer_lm_big": BIG,
    "transformer_lm_wiki103": WIKI103,
    "transformer_lm_baevski_wiki103": WIKI103,
    "transformer_lm_gbw": GBW,
    "transformer_lm_baevski_gbw": GBW,
    "transformer_lm_gpt": _gpt(12, 768, 12),
    "transformer_lm_gpt2_small": _gpt(24, 1024, 16),  # fairseq's of this name: GPT-2's shape with 24 layers
    "transformer_lm_gpt2_tiny": _gpt(2, 64, 1, ffn=64),
    "transformer_lm_gpt2_medium": _gpt(36, 1280, 20),
    "transformer_lm_gpt2_big": _gpt(48, 1600, 25),
    "transformer_lm_gpt2_big_wide": _gpt(24, 2048, 32),
    "transformer_lm_gpt2_bigger": _gpt(48, 2048, 32),
    "gpt2_tiny": _gpt2(2, 64, 4),
    "gpt2_small": _gpt2(12, 768, 12),
    "gpt2_medium": _gpt2(24, 1024, 16),
    "gpt2_large": _gpt2(36, 1280, 20),
    "gpt2_xl": _gpt2(48, 1600, 25),
    "llama_tiny": _llama(2, 64, 4, 2, 128),
    "llama_demo": _llama(4, 256, 4, 2, 704),
    "llama_135m": _llama(30, 576, 9, 3, 1536),  # SmolLM's sizes (Allal et al. 2024), with 49,152 words
    "llama_360m": _llama(32, 960, 15, 5, 2560),
    "llama_1b": _llama(22, 2048, 32, 4, 5632, tied=False),  # TinyLlama's (Zhang et al. 2024)
    "llama_7b": _llama(32, 4096, 32, 32, 11008, tied=False),
    "pythia_tiny": _pythia(2, 64, 4),
    "pythia_14m": _pythia(6, 128, 4),
    "pythia_70m": _pythia(6, 512, 8),
    "pythia_160m": _pythia(12, 768, 12),
    "pythia_410m": _pythia(24, 1024, 16),
    "pythia_1b": _pythia(16, 2048, 8),
    "pythia_1.4b": _pythia(24, 2048, 16),
    "transformer_lm_gpt3_small": _gpt3(12, 768, 12),
    "transformer_lm_gpt3_medium": _gpt3(24, 1024, 16),
    "transformer_lm_gpt3_large": _gpt3(24, 1536, 16),
    "transformer_lm_gpt3_xl": _gpt3(24, 2048, 32),
    "transformer_lm_gpt3_2_7": _gpt3(32, 2560, 32),
    "transformer_lm_gpt3_6_7": _gpt3(32, 4096, 32),
    "transformer_lm_gpt3_13": _gpt3(40, 5120, 40),
    "transformer_lm_gpt3_175": _gpt3(96, 12288, 96),
    "transformer_lm_demo": DEMO,
    "transformer_lm_tiny": TINY,
    "transformer_lm_fast": {**DEMO, **FAST, **NOTES, **DIAL},
    "transformer_lm_fast_wiki103": {**WIKI103, **FAST},
    "transformer_lm_fast_demo": {**DEMO, **FAST, **NOTES},
    "transformer_lm_fast_tiny": {**TINY, **FAST},
    "shortformer": {**BASE, **SHORTFORMER},
    "shortformer_wiki103": {**WIKI103, **SHORTFORMER},
    "shortformer_demo": {**DEMO, **SHORTFORMER},
    "shortformer_tiny": {**TINY, **SHORTFORMER},
}
SMALL = [
    f"{family}_{size}"
    for family in ("transformer_lm", "transformer_lm_fast", "shortformer")
    for size in ("demo", "tiny")
]
"""Architectures of :func:`_small`."""
