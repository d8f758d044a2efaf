"""README's quick start, run as it stands, on a small text and for fewer updates."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import runs

from fairseq.config import options
from fairseq_cli import eval_lm, preprocess, train
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.preprocess import get_preprocessing_parser

PROGRAMS = {
    "fairseq-preprocess": (preprocess, get_preprocessing_parser),
    "fairseq-train": (train, get_training_parser),
    "fairseq-eval-lm": (eval_lm, get_eval_lm_parser),
}


@pytest.fixture(autouse=True)
def bfloat16_is_computed_in_bfloat16() -> None:
    """Nor is it: the commands compute as they do for a reader, in the faster precision."""


def block(page: str, heading: str) -> list[str]:
    """The lines of the first block of commands behind *heading* on *page*."""
    text = (runs.ROOT / page).read_text(encoding="utf-8").split(heading)[1]
    return re.split(r"```(?:bash)?\n", text)[1].replace("\\\n", " ").splitlines()


def write_texts(folder: Path) -> None:
    """A text of enough words for a dictionary that is larger than the architecture's bands."""
    rng = np.random.RandomState(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(word) for word in rng.choice(letters, (2500, 6))])
    for name, lines in (("train", 1500), ("valid", 20), ("test", 20)):
        text = [" ".join(rng.choice(words, 12)) for _ in range(lines)]
        (folder / f"{name}.txt").write_text("\n".join(text) + "\n")


def run(line: str, *more: str) -> object:
    module, parser = PROGRAMS[line.split()[0]]
    return module.main(options.parse_args_and_arch(parser(), [*shlex.split(line)[1:], *more]))


def test_the_three_commands_are_short_and_make_a_model_a_score_and_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = block("README.md", "## Quick start")
    assert [line.split()[0] for line in lines] == list(PROGRAMS) and max(map(len, lines)) <= 80
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    run(lines[0])
    run(lines[1], "--max-update", "2", "--cpu")
    figures = run(lines[2], "--cpu")
    assert isinstance(figures, dict) and figures["bits_per_byte"] > 0
    assert (tmp_path / "sample.txt").read_text().strip()
    # The guide's first command, with the settings that this run has written.
    [line] = block("docs/resuming.md", "## Start a new run from the old weights")
    run(line.replace("new-bin", "data-bin"), "--max-update", "1", "--cpu")
    assert (tmp_path / "adapted" / "checkpoint_best.pt").exists()
    options.parse_args_and_arch(get_training_parser(), shlex.split(line)[1:])


def test_the_recipe_is_the_one_that_was_measured() -> None:
    """The fifteen flags of which docs/results.md has the figures."""
    flags = "--arch transformer_lm_fast_demo --optimizer adam --adam-betas 0.9,0.99 --lr 4e-3 --lr-scheduler wsd"
    flags += " --decay-shape linear --clip-norm 0.25 --dropout 0 --tokens-per-sample 64 --batch-size 32"
    before = runs.arguments(flags, "--warmup-ratio 0.05 --decay-ratio 0.7 --max-update 560")
    assert vars(runs.arguments("--arch transformer_lm_fast_demo")) == vars(before)
