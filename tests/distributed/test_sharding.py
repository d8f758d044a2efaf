"""Processes that hold parts of the parameters train as processes that hold all of them, and as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import noted
import pytest
import runs
import torch
from jobs import run_all

from fairseq.errors import UserError

SHARDED = "--ddp-backend fully_sharded"
PLAIN = "--ddp-backend no_c10d"
ADAM = "--optimizer adam --weight-decay 0.01 --lr 0.002 --no-epoch-checkpoints"
TIED = "--tie-adaptive-weights --tie-adaptive-proj"
LM = [runs.BASELINE, TIED, runs.NO_DROPOUT, ADAM, "--max-update 8 --save-interval-updates 5"]
SHORTFORMER = [runs.SHORTFORMER, runs.NO_DROPOUT, ADAM, "--max-update 8"]
XL = """--arch transformer_xl_tiny --cpu --train-subset valid --valid-subset test --tokens-per-sample 16 --mem-len 24
    --required-batch-size-multiple 1 --optimizer adam --lr 0.003 --clip-norm 0.25 --seed 3 --log-format json
    --log-interval 1 --cutoffs 100,400 --div-val 2 --tie-projs --no-epoch-checkpoints --dropout 0 --dropatt 0
    --max-update 8"""
NOTES = [noted.TNF_ELECTRA, "--encoder-input-dim 8 --dropout 0 --no-epoch-checkpoints --max-update 8"]
HALF = "--max-tokens 32"
WHOLE = "--max-tokens 64"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noted.corpus(tmp_path_factory.mktemp("noted"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, dict[str, Any]]:
    """Folder and logs of runs of two processes."""
    folder = tmp_path_factory.mktemp("two")
    notes = [NOTES, "--max-tokens 48"]
    cases = {
        "lm": [LM, HALF, SHARDED],
        "resumed": [LM, HALF, SHARDED, "--restore-file", folder / "lm" / "checkpoint_1_5.pt"],
        "shortformer": [SHORTFORMER, HALF, SHARDED],
        "xl": [XL, "--batch-size 2", SHARDED],
        "notes": [notes, SHARDED, "DATA", data],
        "notes-whole": [notes, PLAIN, "DATA", data],
        "twice": [LM, HALF, SHARDED, "--update-freq 2"],
        "recomputed": [LM, HALF, SHARDED, "--dropout 0.2 --attention-dropout 0.1 --checkpoint-activations"],
        "dropout": [LM, HALF, PLAIN, "--dropout 0.2 --attention-dropout 0.1"],
        "recomputed-whole": [LM, HALF, PLAIN, "--dropout 0.2 --attention-dropout 0.1 --checkpoint-activations"],
        "offloaded": [LM, HALF, SHARDED, "--cpu-offload"],
        "averaged": [LM, HALF, SHARDED, "--average-weights-from 3"],
        "averaged-whole": [LM, HALF, PLAIN, "--average-weights-from 3"],
        "bf16": [LM, HALF, SHARDED, "--bf16"],
        "bf16-whole": [LM, HALF, PLAIN, "--bf16"],
        "fp16": [LM, HALF, SHARDED, "--fp16 --fp16-init-scale 1e6"],
        "fp16-whole": [LM, HALF, PLAIN, "--fp16 --fp16-init-scale 1e6"],
        "uneven": [LM, SHARDED, "--tokens-per-sample 600 --max-tokens 1200 --max-update 4"],
    }
    refused = {name: [LM, HALF, SHARDED, flags] for name, (flags, _) in REFUSED.items()}
    return folder, run_all(folder, 2, {**cases, **refused}, refused)


def losses(log: list[dict[str, Any]]) -> list[float]:
    return runs.losses(log) + [line["loss"] for line in runs.summaries(log, "test")]


def norms(log: list[dict[str, Any]]) -> list[float]:
    return [line["gnorm"] for line in runs.updates(log)]


def assert_follows(log: Any, other: Any, loss: float = 1e-5, norm: float = 1e-4) -> None:
    assert len(losses(log)) > 0
    assert losses(log) == pytest.approx(losses(other), abs=loss)
    assert norms(log) == pytest.approx(norms(other), rel=norm)


@pytest.mark.parametrize(("name", "flags"), [("lm", LM), ("shortformer", SHORTFORMER), ("xl", XL)])
def test_sharded_processes_follow_one_process(two: Any, tmp_path: Path, name: str, flags: Any) -> None:
    alone = runs.train(tmp_path, flags, "--batch-size 4" if name == "xl" else WHOLE)
    assert_follows(two[1][name], alone)
    ours, theirs = (runs.content(folder / "checkpoint_last.pt")["model"] for folder in (two[0] / name, tmp_path))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key.endswith("k_proj.bias"):
            continue  # its gradient is zero but for rounding, which Adam divides by itself
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=1e-4, msg=key)


def test_a_resumed_run_is_bit_identical_to_the_uninterrupted_one(two: Any) -> None:
    folder, logs = two
    assert runs.updates(logs["resumed"]) == runs.updates(logs["lm"])[5:]
    ends = [runs.content(folder / name / "checkpoint_last.pt") for name in ("lm", "resumed")]
    assert runs.difference(*ends) is None


PAIRS = {
    "notes": ("notes-whole", 1e-5, 1e-4),
    "recomputed": ("dropout", 1e-5, 1e-4),
    "averaged": ("averaged-whole", 1e-5, 1e-4),
    "offloaded": ("lm", 0.0, 0.0),
    "recomputed-whole": ("dropout", 0.0, 0.0),
    "bf16": ("bf16-whole", 1e-5, 1e-4),
    "fp16": ("fp16-whole", 2e-3, 1e-2),
}


@pytest.mark.parametrize("name", PAIRS)
def test_sharded_processes_follow_replicated_ones(two: Any, name: str) -> None:
    other, loss, norm = PAIRS[name]
    assert_follows(two[1][name], two[1][other], loss, norm)


def test_batches_added_up_are_one_larger_batch(two: Any, tmp_path: Path) -> None:
    assert_follows(two[1]["twice"], runs.train(tmp_path, LM, "--max-tokens 128"))


def test_a_process_without_a_batch_takes_part(two: Any, tmp_path: Path) -> None:
    alone = runs.train(tmp_path, LM, "--tokens-per-sample 600 --max-tokens 2400 --max-update 4")
    assert_follows(two[1]["uneven"], alone)


REFUSED = {
    "dropped": ("--decoder-layerdrop 0.4", "leaves out layers"),
    "compiled": ("--compile", "--compile: cannot be combined with --ddp-backend fully_sharded"),
    "lamb": ("--optimizer lamb", "FairseqLAMB needs whole parameters"),
    "groups": ("--shard-group-size 3", "--shard-group-size 3: must divide the number of processes, 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused(two: Any, name: str) -> None:
    assert REFUSED[name][1] in (two[0] / f"{name}.error").read_text()


@pytest.mark.parametrize("flag", ["--cpu-offload", "--shard-group-size 2"])
def test_flags_of_sharding_need_the_backend(tmp_path: Path, flag: str) -> None:
    with pytest.raises(UserError, match="needs --ddp-backend fully_sharded"):
        runs.train(tmp_path, LM, flag)
