"""Any rank of sharded training may be killed at any instant; as many processes, or fewer, or more,
go on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forks
import kills
import noted
import pytest
import runs
import torch

FULL = kills.KILLS >= 20
KILLS = kills.KILLS if FULL else 1  # of each job
UPDATES = 6 * (KILLS + 1)  # a kill comes before the third save of its start
SHARDED = "--ddp-backend fully_sharded --disable-validation"
SAVES = "--save-interval-updates 2 --keep-interval-updates 2 --keep-last-epochs 1"
XL = """--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --mem-len 24
    --required-batch-size-multiple 1 --clip-norm 0.25 --seed 3 --log-format json --log-interval 1 --cutoffs 100,400
    --div-val 2 --tie-projs"""
STAGES = f"--stages 8:{UPDATES // 2},16:{UPDATES}"
NAG = f"--optimizer nag --momentum 0.9 --lr 0.01 --max-update {UPDATES}"
SAME: dict[str, Any] = {
    "shortformer": [runs.SHORTFORMER, runs.DROPOUT, STAGES, "--async-save --optimizer adam --lr 0.002 --max-tokens 32"],
    "xl": [XL, f"--optimizer adam --lr 0.003 --max-update {UPDATES} --batch-size 2"],
    "notes": [noted.TNF_BERT, f"--max-update {UPDATES} --max-tokens 48 --async-save"],
}
OTHER: dict[str, Any] = {  # weights so large that a lost memory shows in the losses
    "shortformer": ([runs.SHORTFORMER, runs.NO_DROPOUT, NAG, "--max-tokens"], {4: "16", 2: "32", 1: "64"}, [4, 2]),
    "xl": ([XL, NAG, "--init-std 0.2 --dropout 0 --dropatt 0 --batch-size"], {4: "1", 2: "2", 1: "4"}, [4, 2]),
    "notes": (  # rows have lengths of their own, so that batches stay as they were cut
        [noted.TNF_BERT, NAG, "--dropout 0 --attention-dropout 0 --batch-size 1 --update-freq"],
        {4: "1", 2: "2", 1: "4"},
        [4, 2],
    ),
}
if not FULL:  # one kill of notes, and one of a memory
    del SAME["shortformer"], SAME["xl"], OTHER["shortformer"], OTHER["notes"]


def test_killed_ranks_end_together_and_as_many_or_others_go_on_to_the_uninterrupted_runs_end(tmp_path: Path) -> None:
    notes = noted.corpus(tmp_path)
    cases = {}
    for name, flags in SAME.items():
        words = runs.words(notes if name == "notes" else runs.DATA, flags, SHARDED)
        cases[f"same-{name}"] = forks.Case({2: [*words, *SAVES.split()]}, [2], KILLS)
        cases[f"same-{name}-whole"] = forks.Case({2: words}, [2])
    for name, (flags, rows, sizes) in OTHER.items():
        words = runs.words(notes if name == "notes" else runs.DATA, SHARDED, flags)
        each = {size: [*words, rows[size], *SAVES.split()] for size in sizes}
        cases[f"other-{name}"] = forks.Case(each, sizes, KILLS)
        cases[f"other-{name}-whole"] = forks.Case({1: [*words, rows[1]]}, [1])
    codes = forks.run_all(tmp_path, cases)  # one test: all of them are forked from one process
    for name, starts in codes.items():
        for killed in starts[:-1]:
            assert killed.count(-9) in (1, len(killed)) and 0 not in killed, name
        assert set(starts[-1]) == {0}, name
    for name in SAME:
        states = [
            runs.content(tmp_path / each / "checkpoint_last.pt") for each in (f"same-{name}", f"same-{name}-whole")
        ]
        assert runs.difference(*states) is None, name
    for name in OTHER:
        assert len({len(each) for each in codes[f"other-{name}"]}) == 2
        _assert_follows(tmp_path / f"other-{name}", tmp_path / f"other-{name}-whole")


def _assert_follows(run: Path, whole: Path) -> None:
    expected = _losses(whole.with_name(f"{whole.name}.log"))
    assert len(expected) == UPDATES == max(expected)
    for number, loss in _losses(run.with_name(f"{run.name}.log")).items():
        assert loss == pytest.approx(expected[number], abs=1e-5), f"{run.name}, update {number}"
    ours, theirs = (runs.content(folder / "checkpoint_last.pt")["model"] for folder in (run, whole))
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=1e-4, msg=key)


def _losses(log: Path) -> dict[int, float]:
    """The loss of each update; those that were repeated after a kill, as last computed."""
    return {line["num_updates"]: line["loss"] for line in runs.records(log.read_text()) if "num_updates" in line}
