"""Architectures of transformer_lm have the published sizes and settings."""

from __future__ import annotations

import argparse
import math

import pytest
import runs
import torch

from fairseq.config import fields
from fairseq.models import ARCHITECTURES
from fairseq.models.transformer_lm import TransformerDecoder, TransformerLanguageModelConfig
from fairseq.models.transformer_lm_settings import TransformerLMConfig

NAMES = tuple(ARCHITECTURES)  # tests before these may register others
PAD = 1


def count(arch, vocabulary, **settings):
    """The parameters of an architecture, built without memory for them."""
    args = argparse.Namespace(**settings)
    ARCHITECTURES[arch].fill(args)
    with torch.device("meta"):
        decoder = TransformerDecoder(fields.typed(TransformerLMConfig, args), vocabulary, PAD)
    return sum(p.numel() for p in decoder.parameters())


def layers(number, dim, ffn):
    """Parameters of the layers: four projections, two of the feed-forward network, two norms."""
    return number * (4 * (dim * dim + dim) + 2 * dim * ffn + ffn + dim + 4 * dim)


@pytest.mark.parametrize("arch", ["transformer_lm_wiki103", "transformer_lm_baevski_wiki103", "shortformer_wiki103"])
def test_wiki103_architecture_has_247_million_parameters(arch):
    bands = [(20000, 1024), (40000, 256), (267744 - 60000, 64)]
    expected = layers(16, 1024, 4096) + sum(n * d + d * 1024 for n, d in bands) + 2 * 1024
    assert count(arch, 267744) == expected == 246_933_504


@pytest.mark.parametrize("arch", ["transformer_lm_gbw", "transformer_lm_baevski_gbw"])
def test_gbw_architecture(arch):
    assert count(arch, 1000) == layers(12, 512, 4096) + 2 * 1000 * 512


def test_gpt2_architecture():
    assert count("transformer_lm_gpt2_small", 50000) == layers(24, 1024, 4096) + 2 * 50000 * 1024 + 2 * 1024


@pytest.mark.parametrize(
    ("name", "number", "dim", "ffn"),
    [("gpt", 12, 768, 3072), ("gpt2_tiny", 2, 64, 64), ("gpt2_medium", 36, 1280, 5120), ("gpt2_big", 48, 1600, 6400)],
)
def test_gpt_architectures_have_fairseqs_sizes(name, number, dim, ffn):
    assert count(f"transformer_lm_{name}", 1000) == layers(number, dim, ffn) + 2 * 1000 * dim + 2 * dim


@pytest.mark.parametrize(
    ("name", "number", "dim", "millions"),
    [("small", 12, 768, 125), ("medium", 24, 1024, 355), ("2_7", 32, 2560, 2700), ("175", 96, 12288, 174_600)],
)
def test_gpt3_architectures_have_learned_positions_and_tied_words(name, number, dim, millions):
    total = count(f"transformer_lm_gpt3_{name}", 50257, tokens_per_sample=2048)
    assert total == layers(number, dim, 4 * dim) + 50257 * dim + (2048 + 2) * dim + 2 * dim
    assert round(total / 1e6) == pytest.approx(millions, rel=0.02)


def test_base_architectures():
    assert count("shortformer", 1000) == layers(6, 512, 2048) + 2 * 1000 * 512 + 2 * 512
    assert count("transformer_lm", 4000) == layers(6, 512, 2048) + 2 * 4000 * 512 == 23_010_304  # fairseq 0.12's
    former = count("transformer_lm", 4000, decoder_normalize_before=True)
    assert former == 23_011_328  # fairseq 0.10.2's
    assert count("transformer_lm_big", 1000) == layers(12, 1024, 4096) + 2 * 1000 * 1024 + 2 * 1024


def test_settings_of_plugins_have_the_defaults_of_fairseqs_dataclass_until_an_architecture_sets_others():
    cfg = TransformerLanguageModelConfig()
    assert (cfg.decoder_normalize_before, cfg.decoder_input_dim, cfg.decoder_output_dim) == (False, 512, 512)
    args = argparse.Namespace(decoder_embed_dim=64)
    ARCHITECTURES["transformer_lm_gpt2_tiny"].fill(args)
    assert (args.decoder_normalize_before, args.decoder_input_dim, args.decoder_output_dim) == (True, 64, 64)


@pytest.mark.parametrize(
    "flags, infused, cache",
    [
        ("--arch transformer_lm_wiki103", False, 0),
        ("--arch transformer_lm_wiki103 --tokens-from-prev 32", True, 32),
        ("--arch transformer_lm_wiki103 --position-infused-attention", True, 0),
        ("--arch shortformer_wiki103", True, 16),
        ("--arch shortformer_wiki103 --tokens-from-prev 32", True, 32),
        ("--arch shortformer", True, 16),
        ("--arch shortformer_demo", True, 16),
    ],
)
def test_flags_and_names_that_make_a_shortformer(flags, infused, cache):
    small = "--decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2"
    cutoffs = "" if flags == "--arch shortformer" else "--adaptive-softmax-cutoff 9,99 --adaptive-input-cutoff 9,99"
    model = runs.model_of(flags, small, cutoffs, "--tokens-per-sample 16 --max-tokens 64")
    assert model.memory_length == cache and model.decoder.infused == infused


def test_wiki103_settings():
    args = argparse.Namespace()
    ARCHITECTURES["transformer_lm_wiki103"].fill(args)
    cfg = fields.typed(TransformerLMConfig, args)
    assert (cfg.dropout, cfg.attention_dropout, cfg.activation_dropout, cfg.adaptive_softmax_dropout) == (
        0.3,
        0.1,
        0.1,
        0.2,
    )
    assert (
        cfg.tie_adaptive_weights
        and cfg.tie_adaptive_proj
        and cfg.no_decoder_final_norm
        and cfg.decoder_normalize_before
    )
    assert cfg.adaptive_input_cutoff == cfg.adaptive_softmax_cutoff == [20000, 60000] and cfg.adaptive_input_factor == 4


@pytest.mark.parametrize("given", [{}, {"decoder_embed_dim": 96, "d_model": 96, "encoder_embed_dim": 96}])
def test_architectures_leave_what_is_given_and_complete_nothing_twice(given):
    for name in NAMES:
        settings = ARCHITECTURES[name].complete(given)
        assert given.items() <= settings.items() and ARCHITECTURES[name].complete(settings) == settings


SMALL = [
    "transformer_lm_fast_tiny",
    "transformer_lm_tiny",
    "transformer_lm_demo",
    "shortformer_tiny",
    "shortformer_demo",
]


@pytest.mark.parametrize("arch", SMALL)
def test_the_loss_of_small_architectures_starts_where_guessing_does(arch):
    torch.manual_seed(1)
    bands = dict.fromkeys(("adaptive_input_cutoff", "adaptive_softmax_cutoff"), [200, 600])
    args = argparse.Namespace(dropout=0.0, tokens_per_sample=32, **bands)
    ARCHITECTURES[arch].fill(args)
    decoder = TransformerDecoder(fields.typed(TransformerLMConfig, args), 1000, PAD)
    # As in a dictionary, where words that occur more often come first.
    tokens = (1000 ** torch.rand(16, 33)).long().clamp(2, 999)
    with torch.no_grad():
        hidden = decoder(tokens[:, :-1])[0].flatten(0, 1)
        losses = -decoder.adaptive_softmax.target_log_probs(hidden, tokens[:, 1:].flatten())
    assert -1 < float(losses.mean()) / math.log(2) - math.log2(1000) < 0.3
