"""A run that is started again: what has ended stays ended, and its checkpoint is read once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import runs
from mistakes import logged
from small_runs import FIVE

TWO_RATES = [FIVE, "--lr-scheduler fixed --lr 0.001,0.00001 --no-epoch-checkpoints"]


@pytest.mark.parametrize("flag", ["--min-lr", "--stop-min-lr"])
def test_a_run_that_its_rate_has_ended_stays_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture, flag: str) -> None:
    caplog.set_level(logging.INFO)
    flags = [*TWO_RATES, flag, "1e-5"]
    assert len(runs.updates(runs.train(tmp_path, *flags))) == 10
    assert f"{flag} 1e-05 is reached after 10 updates" in logged(caplog)
    caplog.clear()
    assert runs.updates(runs.train(tmp_path, *flags)) == []
    assert f"nothing to do: {flag} 1e-05 is reached after 10 updates; change it to train on" in logged(caplog)


def test_a_run_that_stopped_before_the_epoch_of_its_last_rate_trains_that_epoch(tmp_path: Path) -> None:
    flags = [*TWO_RATES, "--min-lr 1e-5"]
    assert len(runs.updates(runs.train(tmp_path, *flags, "--max-epoch 1"))) == 5
    assert [line["lr"] for line in runs.updates(runs.train(tmp_path, *flags))] == [1e-5] * 5
