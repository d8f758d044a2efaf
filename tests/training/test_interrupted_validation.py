"""A signal during a validation ends it: the run saves at once, and the resumed run begins with the
validation."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import runs
from small_runs import FIVE

from fairseq.criterions.cross_entropy import AdaptiveLoss

FLAGS = [FIVE, runs.ADAM, runs.DROPOUT, "--max-tokens 320 --no-epoch-checkpoints --max-valid-steps 4"]


class Signalling:
    """Sends SIGTERM in the second batch of validation *number*, from 1, and counts the batches of
    each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.batches: list[int] = [0]
        compute = AdaptiveLoss.compute_loss

        def compute_loss(criterion: Any, model: Any, *args: Any) -> Any:
            if model.training:
                self.batches += [0] if self.batches[-1] else []
            else:
                self.batches[-1] += 1
                if len(self.batches) == number and self.batches[-1] == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
            return compute(criterion, model, *args)

        monkeypatch.setattr(AdaptiveLoss, "compute_loss", compute_loss)


def metrics(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in runs.CLOCKS} for line in lines]


@pytest.mark.parametrize(
    ("flags", "number", "updates"),
    [
        ("--max-update 12 --validate-interval-updates 4", 1, 4),
        ("--max-update 12 --save-interval-updates 5", 1, 5),
        ("--max-epoch 2 --lr-scheduler reduce_lr_on_plateau --lr-patience 0 --lr-threshold 10", 1, 9),
        ("--max-epoch 2", 2, 18),
        ("--stages 16:6,32:12 --arch shortformer_tiny --max-tokens-valid 320", 1, 6),
    ],
    ids=["interval", "checkpoint", "epoch", "end", "stage"],
)
def test_the_resumed_run_is_as_if_nothing_had_happened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    flags: str,
    number: int,
    updates: int,
) -> None:
    caplog.set_level(logging.INFO)

    def train(name: str) -> None:
        runs.train(tmp_path / name, FLAGS, flags, "--metrics-file", tmp_path / name / "metrics.jsonl")

    train("whole")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        signalling = Signalling(patch, number)
        train("run")
    assert end.value.code == 128 + signal.SIGTERM
    assert signalling.batches[-1] == 2, "no further batch"
    last = tmp_path / "run" / "checkpoint_last.pt"
    saved = runs.content(last)
    assert saved["optimizer_history"][-1]["num_updates"] == updates and saved["extra_state"]["due"]["validate"]
    assert f"stopped by SIGTERM after update {updates}; saved {last}; to go on: " in caplog.text
    caplog.clear()
    train("run")
    assert caplog.messages[-1].startswith("done training")
    whole = tmp_path / "whole"
    names = {path.name for path in whole.glob("*.pt")}
    assert names == {path.name for path in (tmp_path / "run").glob("*.pt")}
    for name in sorted(names):
        assert runs.difference(runs.content(whole / name), runs.content(tmp_path / "run" / name)) is None, name
    assert metrics(whole / "metrics.jsonl") == metrics(tmp_path / "run" / "metrics.jsonl")
