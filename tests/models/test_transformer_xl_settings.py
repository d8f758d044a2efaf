"""Settings, architectures and initial values of Transformer-XL."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq.errors import UserError
from fairseq.models import ARCHITECTURES
from fairseq.models.transformer_xl import TransformerXL, TransformerXLDecoder
from fairseq.models.transformer_xl_settings import TransformerXLConfig

VOCABULARY = 29


SMALL = TransformerXLConfig(
    n_layer=3, n_head=2, d_model=8, d_head=3, d_inner=12, dropout=0.0, mem_len=5, tokens_per_sample=4, untie_r=True
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clamp_len": 0}, "clamp_len 0"),
        ({"same_length": True, "mem_len": 0}, "same_length"),
        ({"position_encoding": "absolute"}, "mem_len 5: with position_encoding absolute"),
        ({"position_encoding": "shaw", "clamp_len": 4}, "clamp_len 4"),
        ({"d_model": 9}, "d_model 9"),
        ({"d_head": None, "n_head": 3}, "n_head 3"),
        ({"cutoffs": [5, 40]}, "cutoffs 5,40"),
        ({"cutoffs": [5, 12], "div_val": 4}, "div_val 4"),
        ({"tie_projs": "1"}, "tie_projs 1"),
        ({"cutoffs": [5], "tie_projs": "some"}, "tie_projs some"),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SMALL, **changes).check_vocabulary(VOCABULARY)


def parameters(arch: str, vocabulary: int, **settings: Any) -> int:
    """The number of parameters, counted without memory for them."""
    args = argparse.Namespace(**settings)
    ARCHITECTURES[arch].fill(args)
    cfg = TransformerXLConfig(**vars(args))
    cfg.check_vocabulary(vocabulary)
    with torch.device("meta"):
        model = TransformerXL(TransformerXLDecoder(cfg, vocabulary))
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("arch", "vocabulary", "millions"),
    [
        ("transformer_xl_wiki103_base", 267_735, 151),
        ("transformer_xl_wiki103_large", 267_735, 285),  # the paper says 257, of the same settings
        ("transformer_xl_enwik8_base", 204, 41),
        ("transformer_xl_enwik8_medium", 204, 88),
        ("transformer_xl_enwik8_large", 204, 277),
        ("transformer_xl_text8_large", 27, 277),
        ("transformer_xl_lm1b_base", 793_471, 357),  # the paper says 460
        ("transformer_xl_lm1b_large", 793_471, 841),  # the paper says 800
        ("transformer_xl_wiki103_ablation", 267_735, 128),
        ("transformer_xl_ptb", 10_000, 24),
    ],
)
def test_architectures_have_their_number_of_parameters(arch: str, vocabulary: int, millions: int) -> None:
    assert parameters(arch, vocabulary) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize(
    ("arch", "settings", "expected"),
    [
        ("wiki103_large", {}, 285_170_506),
        ("wiki103_large", {"n_layer": 16, "tie_projs": "all"}, 256_840_522),
        ("lm1b_base", {}, 357_812_082),
        ("lm1b_base", {"tie_weight": False}, 466_507_618),
        ("lm1b_ablation", {}, 301_166_450),
    ],
)
def test_numbers_of_parameters_in_the_recipes_readme(arch: str, settings: dict[str, Any], expected: int) -> None:
    vocabulary = {"wiki103": 267_735, "lm1b": 793_471}[arch.split("_")[0]]
    assert parameters(f"transformer_xl_{arch}", vocabulary, **settings) == expected
    readme = Path(__file__).parents[2] / "examples" / "transformer_xl" / "README.md"
    assert f"{expected / 1e6:.1f} M" in readme.read_text()


def test_initial_values_are_the_authors() -> None:
    torch.manual_seed(1)
    cfg = TransformerXLConfig(n_layer=1, n_head=8, d_model=256, d_inner=512, cutoffs=[100], div_val=4, d_embed=256)
    model = TransformerXLDecoder(cfg, 1000)
    named = dict(model.named_parameters())
    assert float(named["embed_tokens.embeddings.0.0.weight"].detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(named["embed_tokens.embeddings.1.1.weight"].detach().std()) == pytest.approx(0.01, rel=0.05)
    assert float(named["adaptive_softmax.bands.0.projection"].detach().std()) == pytest.approx(0.01, rel=0.05)
    assert float(named["layers.0.self_attn.r_proj.weight"].detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(named["layers.0.final_layer_norm.weight"].detach().mean()) == pytest.approx(1.0, abs=0.01)
    assert float(named["layers.0.fc1.bias"].detach().abs().max()) == 0.0
    narrow = dict(TransformerXLDecoder(replace(cfg, init_std=0.005), 1000).named_parameters())
    assert float(narrow["layers.0.fc1.weight"].detach().std()) == pytest.approx(0.005, rel=0.05)
    assert float(narrow["embed_tokens.embeddings.1.1.weight"].detach().std()) == pytest.approx(0.01, rel=0.05)
    shaw = TransformerXLDecoder(replace(SMALL, position_encoding="shaw", max_relative_length=6), VOCABULARY)
    assert not shaw.layers[0].self_attn.r_bias.any() and shaw.layers[0].self_attn.r_emb.all()
