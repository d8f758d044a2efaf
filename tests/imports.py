"""``fairseq-import`` for the tests: models of both kinds, golden and random, brought in in this
process."""

from __future__ import annotations

import json
from pathlib import Path

import naive_xl
import numpy as np
import pytest
import torch

from fairseq.config import options
from fairseq.errors import UserError
from fairseq_cli import import_model
from fairseq_cli.import_model import get_import_parser

GOLDEN = Path(__file__).parent / "golden"
AUTHORS, HF = GOLDEN / "transformer_xl", GOLDEN / "hf_transfo_xl"
NAMES = ("base", "adaptive_div1", "adaptive_div2", "prenorm", "same_length_clamp", "shaw", "vaswani", "alrfou")
SMALL = {
    "vocab_size": 40,
    "cutoffs": [9, 22],
    "div_val": 1,
    "attn_type": 0,
    "pre_lnorm": False,
    "same_length": False,
    "clamp_len": -1,
    "tie_weight": True,
    "tie_projs": [False, False, False],
    "tgt_len": 5,
    "mem_len": 6,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 12,
    "d_head": 6,
    "d_inner": 16,
}


def run(*argv: object) -> None:
    """``fairseq-import``."""
    import_model.main(options.parse_args_and_arch(get_import_parser(), list(map(str, argv))))


def authors(source: Path, out: Path, *more: object) -> Path:
    run(source, "--from", "transformer-xl", "--out", out, *more)
    return out


def hugging_face(source: Path, out: Path) -> Path:
    run(source, "--from", "hf-transfo-xl", "--out", out)
    return out


def golden(name: str) -> tuple[dict, dict]:
    with np.load(AUTHORS / f"{name}.npz") as file:
        return json.loads((AUTHORS / f"{name}.json").read_text()), dict(file)


def saved(folder: Path, config: dict, state: dict | None = None) -> tuple[Path, dict]:
    """A model, random unless given, in ``state.pt`` and ``config.json``: (path of the first, its
    state dict)."""
    state = naive_xl.random_state(config) if state is None else state
    torch.save(state, folder / "state.pt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "state.pt", state


def some_tokens(words: int = 40, rows: int = 2, length: int = 18) -> torch.Tensor:
    return torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(3))


def refusal(*argv: object) -> str:
    """The one line with which ``fairseq-import`` refuses."""
    with pytest.raises(UserError) as error:
        run(*argv)
    assert "\n" not in error.value.with_flags
    return error.value.with_flags


SHAPES = {
    "one band, projected": {"cutoffs": [], "d_embed": 8, "tie_projs": [True]},
    "one band, nothing tied": {"cutoffs": [], "tie_weight": False, "tie_projs": [False]},
    "narrow, one projection, mixed ties": {"d_embed": 8, "tie_projs": [True, False, True]},
    "narrow, bands of their own": {"d_embed": 8, "div_val": 2, "tie_projs": [False, True, False], "tie_weight": False},
    "all tied, pre-norm, clamped": {
        "div_val": 3,
        "tie_projs": [True, True, True],
        "pre_lnorm": True,
        "same_length": True,
        "clamp_len": 4,
    },
    "odd heads": {"d_head": 5, "n_head": 3, "div_val": 2, "same_length": True},
    "shaw, narrow": {"attn_type": 1, "d_embed": 8, "div_val": 2, "d_head": 4},
    "shaw, pre-norm, same length": {"attn_type": 1, "pre_lnorm": True, "same_length": True},
    "absolute": {"attn_type": 2, "mem_len": 0, "div_val": 2, "pre_lnorm": True},
    "learned": {"attn_type": 3, "mem_len": 0, "cutoffs": [], "tie_projs": []},
}
