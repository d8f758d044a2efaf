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
UPDATES = 12 * (KILLS + 1)
SHARDED = "--ddp-backend fully_sharded --disable-validation"
SAVES = "--save-interval-updates 3 --keep-interval-updates 2 --keep-last-epochs 1"
XL = """--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --mem-len 24
    --required-batch-size-multiple 1 --clip-norm 0.25 --seed 3 --log-format json --log-interval 1 --cutoffs 100,400
    --div-val 2 --tie-projs"""
STAGES = f"--stages 8:{UPDATES // 2},16:{UPDATES}"
NAG = f"--optimizer nag --momentum 0.9 --lr 0.01 --max-update {UPDATES}"
SAME: dict[str, Any] = {
    "shortformer": [runs.SHORTFORMER, runs.DROPOUT, STAGES, "--async-save --optimizer adam --lr 0.002 --max-tokens 32"],
    "xl": [XL, f"--optimizer adam --lr 0.003 --max-update {UPDATES} --batch-size 2"],
    "notes": [noted.TNF_BERT, f"--max-update {UPDATES} --max-tokens 48"],
}
OTHER: dict[str, Any] = {
    "shortformer": ([runs.SHORTFORMER, runs.NO_DROPOUT, NAG, "--max-tokens"], {4: "16", 2: "32", 1: "64"}, [4, 2]),
    "xl": ([XL, NAG, "--dropout 0 --dropatt 0 --batch-size"], {4: "1", 2: "2", 1: "4"}, [4, 2]),
    "notes": (  # rows have lengths of their own, so that batches stay as they were cut
        [noted.TNF_BERT, NAG, "--dropout 0 --attention-dropout 0 --batch-size 1 --update-freq"],
        {4: "1", 2: "2", 1: "4"},
        [4, 2],
    ),
}
if not FULL:  # one kill of each model
    del SAME["xl"], OTHER["shortformer"], OTHER["notes"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[int]]]]:
    """Folder and exit codes of jobs that were killed, and of uninterrupted ones."""
    folder = tmp_path_factory.mktemp("jobs")
    notes = noted.corpus(folder)
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
    return folder, forks.run_all(folder, cases)


@pytest.mark.parametrize("name", SAME)
def test_ranks_killed_at_random_instants_end_bit_identical_to_the_uninterrupted_run(jobs: Any, name: str) -> None:
    folder, codes = jobs
    states = [runs.content(folder / each / "checkpoint_last.pt") for each in (f"same-{name}", f"same-{name}-whole")]
    assert runs.difference(*states) is None
    assert codes[f"same-{name}"][-1] == [0, 0]


@pytest.mark.parametrize("name", OTHER)
def test_other_numbers_of_processes_go_on_after_a_kill_as_one_process_would(jobs: Any, name: str) -> None:
    folder, codes = jobs
    whole = _losses(folder / f"other-{name}-whole.log")
    assert len(whole) == UPDATES == max(whole)
    for number, loss in _losses(folder / f"other-{name}.log").items():
        assert loss == pytest.approx(whole[number], abs=1e-5), f"update {number}"
    ours, theirs = (
        runs.content(folder / each / "checkpoint_last.pt")["model"] for each in (f"other-{name}", f"other-{name}-whole")
    )
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=1e-4, msg=key)
    assert len({len(each) for each in codes[f"other-{name}"]}) == 2


def test_every_rank_of_a_job_ends_by_itself_when_one_is_killed(jobs: Any) -> None:
    for name, codes in jobs[1].items():
        for killed in codes[:-1]:
            assert killed.count(-9) in (1, len(killed)) and 0 not in killed, name


def _losses(log: Path) -> dict[int, float]:
    """The loss of each update; those that were repeated after a kill, as last computed."""
    return {line["num_updates"]: line["loss"] for line in runs.records(log.read_text()) if "num_updates" in line}
