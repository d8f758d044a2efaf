"""A run that can be left alone: its settings, its saves, its best checkpoints and its records."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import runs
from mistakes import user_error

from fairseq import checkpoint
from fairseq.checkpoint import CheckpointManager
from fairseq.errors import with_flags
from fairseq.optim.lr_scheduler import cycles
from fairseq.training import log as lines
from fairseq.training import loop, state
from fairseq.training.state import TrainingState

QUICK = f"{runs.BASELINE} {runs.NO_DROPOUT} --no-epoch-checkpoints --disable-validation"


def test_no_settings_are_written_where_nothing_is_saved(tmp_path: Path) -> None:
    runs.train(tmp_path / "a", QUICK, "--max-update 1 --no-save")
    assert not (tmp_path / "a").exists()


def test_the_best_checkpoint_belongs_to_a_stage(tmp_path: Path) -> None:
    flags = [runs.BASELINE, "--stages 8:4,32:6 --max-tokens 64 --validate-interval-updates 2 --no-epoch-checkpoints"]
    runs.train(tmp_path, *flags, "--save-interval-updates 2 --keep-interval-updates 1")
    best = {path.name: runs.checkpoint.read(path)["extra_state"] for path in tmp_path.glob("checkpoint_best*.pt")}
    assert {name: extra["stage"]["number"] for name, extra in best.items()} == {
        "checkpoint_best1.pt": 1,
        "checkpoint_best.pt": 2,
    }
    last = runs.checkpoint.read(tmp_path / "checkpoint_last.pt")["extra_state"]
    assert last["best"] == best["checkpoint_best.pt"]["val_loss"]


def test_a_second_command_with_longer_blocks_has_a_best_of_its_own(tmp_path: Path) -> None:
    runs.train(tmp_path, runs.BASELINE, "--max-update 2 --no-epoch-checkpoints")
    runs.train(tmp_path, runs.BASELINE, "--max-update 3 --no-epoch-checkpoints --tokens-per-sample 32")
    assert {path.name for path in tmp_path.glob("*best*")} == {"checkpoint_best.pt", "checkpoint_best1.pt"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the clock of a run shows; an update that is tried takes a minute."""
    now = [1000.0]
    step = loop.update

    def timed_update(state: TrainingState, samples: Any, ask: Any) -> Any:
        now[0] += 60
        return step(state, samples, ask)

    monkeypatch.setattr(loop, "update", timed_update)
    for module in (loop, state, lines):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The updates after which a run saves."""
    updates: list[int] = []
    due = CheckpointManager.due
    monkeypatch.setattr(CheckpointManager, "due", lambda self, point: updates.append(point.updates) or due(self, point))
    return updates


def test_a_checkpoint_is_saved_when_its_minutes_are_over(tmp_path: Path, clock: list[float], saves: list[int]) -> None:
    # The wish is told while the update goes on, three minutes after the last save; another save
    # starts them anew.
    runs.train(tmp_path, QUICK, "--max-update 12 --save-interval-minutes 2.5 --save-interval-updates 5")
    assert saves == [3, 5, 8, 10, 12]
    assert (tmp_path / "checkpoint_1_5.pt").exists() and not (tmp_path / "checkpoint_1_3.pt").exists()
    saves.clear()
    runs.train(tmp_path, QUICK, "--max-update 17 --save-interval-minutes 2.5")
    assert saves == [15, 17], "a resumed run counts from its start"
    saves.clear()
    runs.train(tmp_path, QUICK, "--max-update 20 --save-interval-minutes 0")
    assert saves == [20]


def test_training_time_is_that_of_all_parts_of_a_run(tmp_path: Path, clock: list[float]) -> None:
    log = [line for line in runs.train(tmp_path, QUICK, "--max-update 3") if "wall" in line]
    assert [line["wall"] for line in log] == [60, 120, 180]
    clock[0] += 10_000  # while it does not run
    log = [line for line in runs.train(tmp_path, QUICK, "--max-update 5") if "wall" in line]
    assert [line["wall"] for line in log] == [240, 300]
    assert checkpoint.read(tmp_path / "checkpoint_last.pt")["extra_state"]["previous_training_time"] == 300
    log = runs.train(tmp_path, QUICK, "--max-update 9 --stop-time-hours 0.11")
    assert [line["num_updates"] for line in runs.updates(log)] == [6, 7], "7 minutes of 6.6"
    log = [line for line in runs.train(tmp_path, QUICK, "--max-update 9 --reset-meters") if "wall" in line]
    assert [line["wall"] for line in log] == [60, 120]


def test_validation_reads_as_many_batches_and_begins_as_late_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    evaluate = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda state, bar: evaluate(state, (read.append(1) or item for item in bar)))
    flags = [runs.BASELINE, "--max-update 4 --validate-interval-updates 1 --no-save"]
    log = runs.train(tmp_path, *flags, "--max-valid-steps 2 --validate-after-updates 3")
    assert [line["num_updates"] for line in runs.summaries(log, "test")] == [3, 4]
    assert len(read) == 2 * 2


def test_a_changed_period_of_the_cosine_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = [QUICK, "--lr-scheduler cosine --lr 0.01 --max-lr 0.1"]
    runs.train(tmp_path, *flags, "--max-update 2")
    caplog.set_level(logging.INFO, logger=cycles.__name__)
    runs.train(tmp_path, *flags, "--max-update 4")
    said = [with_flags(record.message) for record in caplog.records if record.name == cycles.__name__]
    assert said == ["--max-update: the cosine's period is 4 updates now and was 2; --lr-period-updates 2 keeps it"]


def test_log_file_has_messages_and_figures(tmp_path: Path) -> None:
    runs.train(tmp_path / "run", runs.SHORT, "--log-file", tmp_path / "logs" / "log.txt")
    text = (tmp_path / "logs" / "log.txt").read_text()
    assert text.count("train_inner | epoch 1") == 2 and "test | epoch 1" in text
    with user_error("--log-file .*: cannot be written"):
        runs.train(tmp_path / "run", runs.SHORT, "--log-file", tmp_path)


def test_weights_and_biases_gets_figures_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []

    def init(**settings: Any) -> Any:
        started.append(settings)
        return types.SimpleNamespace(
            id=settings["id"] or "r1", log=lambda values, step: logged.append((step, values)), finish=lambda: None
        )

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    for updates in (1, 2):
        runs.train(tmp_path / "run", QUICK, f"--wandb-project p --max-update {updates}")
    assert started[0]["config"]["max_update"] == 1
    assert [(s["project"], s["name"], s["id"]) for s in started] == [("p", "run", None), ("p", "run", "r1")]
    assert [step for step, values in logged if "train_inner/loss" in values] == [1, 2]
    # Its page compares runs by their settings.
    assert [s["config"]["max_update"] for s in started] == [1, 2] and "lr" in started[0]["config"]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with user_error(r"--wandb-project: .*pip install wandb"):
        runs.train(tmp_path / "run", QUICK, "--wandb-project p --max-update 3")
