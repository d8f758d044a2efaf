"""A signal before a validation, and an error in one, are followed by a save, and the resumed
run begins with the validation; a signal that comes later waits for its end."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import runs
from small_runs import FIVE

from fairseq.config.settings import training_settings
from fairseq.criterions.cross_entropy import AdaptiveLoss
from fairseq.distributed import World
from fairseq.training import Hook, train

FLAGS = [FIVE, runs.ADAM, runs.DROPOUT, "--max-tokens 320 --no-epoch-checkpoints --max-valid-steps 4"]


def signal_in_batch(monkeypatch: pytest.MonkeyPatch, training: bool, number: int) -> list[int]:
    """Send SIGTERM in batch *number*, from 1, of training or of validation; return the counts of
    both."""
    batches = [0, 0]
    compute = AdaptiveLoss.compute_loss

    def compute_loss(criterion: Any, model: Any, *args: Any) -> Any:
        batches[model.training] += 1
        if model.training is training and batches[training] == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(criterion, model, *args)

    monkeypatch.setattr(AdaptiveLoss, "compute_loss", compute_loss)
    return batches


def metrics(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in runs.CLOCKS} for line in lines]


@pytest.mark.parametrize(
    ("flags", "updates", "training"),
    [
        ("--max-update 12 --validate-interval-updates 4", 4, True),
        ("--max-update 12 --save-interval-updates 5", 5, False),
        ("--max-epoch 2 --lr-scheduler reduce_lr_on_plateau --lr-patience 0 --lr-threshold 10", 9, True),
        ("--max-epoch 1", 9, False),
        ("--stages 16:6,32:12 --arch shortformer_tiny --max-tokens-valid 320", 6, True),
    ],
    ids=["before it", "within that of a checkpoint", "before an epoch's", "within the last", "before a stage's"],
)
def test_the_resumed_run_is_as_if_nothing_had_happened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: str,
    updates: int,
    training: bool,
) -> None:
    caplog.set_level(logging.INFO)

    def train(name: str) -> None:
        runs.train(tmp_path / name, FLAGS, flags, "--metrics-file", tmp_path / name / "metrics.jsonl")

    train("whole")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        batches = signal_in_batch(patch, training, updates if training else 2)
        train("run")
    assert end.value.code == 128 + signal.SIGTERM
    assert batches == [0 if training else 4, updates], "a validation is ended, and none is begun"
    saved = runs.content(tmp_path / "run" / "checkpoint_last.pt")
    assert saved["optimizer_history"][-1]["num_updates"] == updates and ("due" in saved["extra_state"]) is training
    caplog.clear()
    train("run")
    whole = tmp_path / "whole"
    names = {path.name for path in whole.glob("*.pt")}
    assert names == {path.name for path in (tmp_path / "run").glob("*.pt")}
    for name in sorted(names):
        assert runs.difference(runs.content(whole / name), runs.content(tmp_path / "run" / name)) is None, name
    assert metrics(whole / "metrics.jsonl") == metrics(tmp_path / "run" / "metrics.jsonl")


class Fails(Hook):
    """Raises an error after the validation of update 4."""

    def on_validate(self, state: Any) -> None:
        if state.num_updates == 4:
            raise RuntimeError("no memory left")


@pytest.mark.parametrize("flags", ["--patience 3 --max-update 12", "--lr-scheduler reduce_lr_on_plateau --max-epoch 1"])
def test_an_error_in_a_validation_leaves_it_to_the_resumed_run(tmp_path: Path, flags: str) -> None:
    flags = f"{flags} --validate-interval-updates 4"
    settings = training_settings(runs.arguments(FLAGS, flags, "--save-dir", tmp_path / "run"))
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(RuntimeError, match="no memory left"):
        train(settings, World(), hooks=[Fails(), Fails()])
    assert [path.name for path in (tmp_path / "run").glob("*.pt")] == ["checkpoint_last.pt"]
    for name in ("run", "whole"):
        runs.train(tmp_path / name, FLAGS, flags)
    for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
        whole, resumed = (runs.content(tmp_path / folder / name) for folder in ("whole", "run"))
        assert runs.difference(whole, resumed) is None
