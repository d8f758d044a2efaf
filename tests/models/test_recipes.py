"""With nothing but data and an architecture a run has the optimizer, schedule and clipping of its
recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import runs

from fairseq.config import options
from fairseq.config.registry import is_outside
from fairseq.models import ARCHITECTURES, MODELS
from fairseq.models.recipes import recipe_of
from fairseq_cli.common import get_training_parser

SPLITS = "--cpu --train-subset valid --valid-subset test"
OURS = [name for name in ARCHITECTURES if not is_outside(MODELS[ARCHITECTURES[name].model])]


@pytest.mark.parametrize("arch", OURS)
def test_every_setting_of_a_recipe_is_one_of_its_parts(arch: str) -> None:
    recipe = recipe_of(arch)
    assert {"optimizer", "lr", "lr_scheduler", "clip_norm"} <= recipe.keys()
    parser: Any = get_training_parser()
    args = options.parse_args_and_arch(parser, [str(runs.DATA), "--arch", arch])
    assert {name: getattr(args, name) for name in recipe} == dict(recipe)
    assert recipe.keys() <= {action.dest for action in parser._actions}, "no setting that nothing reads"


@pytest.mark.parametrize("flags", ["--optimizer sgd", "--lr 0.5", "--lr-scheduler fixed", "--lr 0.1 --max-lr 1"])
def test_a_choice_of_the_user_leaves_the_whole_recipe_out(flags: str, tmp_path: Path) -> None:
    more = " --lr-scheduler cosine --max-update 9" if "max-lr" in flags else ""
    args = runs.arguments("--arch transformer_lm_tiny", flags + more)
    assert args.clip_norm == 0 and (args.optimizer, args.lr) != ("adam", [0.001])
    (tmp_path / "c.yaml").write_text("lr: 0.5\n")
    assert runs.arguments("--arch transformer_lm_tiny --config", tmp_path / "c.yaml").optimizer == "nag"


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--lr 0.5", "lr", [0.5]),
        ("--optimizer muon", "optimizer", "muon"),
        ("--lr-scheduler cosine", "lr_scheduler", "cosine"),
    ],
)
def test_a_choice_of_the_user_replaces_one_setting_of_the_fast_recipe(flags: str, name: str, value: object) -> None:
    args = vars(runs.arguments("--arch transformer_lm_fast_tiny", flags))
    own = {"lr": "no other", "optimizer": "adam_", "lr_scheduler": ("warmup_", "decay_")}[name]
    recipe = {key: value for key, value in recipe_of("transformer_lm_fast_tiny").items() if not key.startswith(own)}
    assert {key: args[key] for key in recipe} == {**recipe, name: value}
    assert args.get("adam_betas", [0.9, 0.999]) == ([0.9, 0.999] if name == "optimizer" else [0.9, 0.99])


def test_flags_and_files_win_over_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("warmup-updates: 7\n")
    args = runs.arguments("--arch transformer_lm_tiny --clip-norm 3 --config", tmp_path / "c.yaml")
    assert (args.clip_norm, args.warmup_updates, args.optimizer) == (3, 7, "adam")


@pytest.mark.parametrize("arch", ["transformer_lm_tiny", "shortformer_tiny", "transformer_xl_tiny", "lstm_lm_tiny"])
def test_nothing_diverges_with_nothing_but_data_and_an_architecture(arch: str, tmp_path: Path) -> None:
    flags = f"{SPLITS} --arch {arch} --batch-size 4 --tokens-per-sample 32 --log-format json --log-interval 1 --no-save"
    log = runs.updates(runs.train(tmp_path, flags, "--max-update 40 --disable-validation"))
    assert all(math.isfinite(line["gnorm"]) for line in log)
    assert log[-1]["loss"] < log[0]["loss"]


def test_help_shows_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse_args_and_arch(get_training_parser(), ["--arch", "transformer_xl_wiki103_large", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "optimizer, see --help-all (default: adam)" in text
    assert "learning-rate schedule, see --help-all (default: cosine)" in text
    assert "(default: 0.25)" in text.split("--clip-norm")[1][:80] and "Adam (adam):" in text
