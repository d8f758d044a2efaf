"""Callbacks of users and plug-ins accompany training: what they see, in which order, and what they
may decide."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
from mistakes import logged
from small_runs import FIVE

from fairseq.config.settings import training_settings
from fairseq.distributed import Interruption, World
from fairseq.training import Callback, Limit, TrainingState, register_callback, train
from fairseq.training.callbacks import callback as registered


class Diary(Callback):
    """Writes down each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        self.calls.append(("begin", state.num_updates))
        yield
        self.calls.append(("end", state.num_updates, state.end is not None))

    def begin_epoch(self, state: TrainingState) -> None:
        self.calls.append(("epoch", state.batches.epoch))

    def before_update(self, state: TrainingState) -> None:
        self.calls.append(("before", state.num_updates))

    def after_update(self, state: TrainingState) -> None:
        self.calls.append(("after", state.num_updates, state.applied))

    def validate(self, state: TrainingState) -> None:
        self.calls.append(("validate", state.due.validate))

    def complete(self, state: TrainingState) -> None:
        self.calls.append(("complete", state.due.end_of_epoch, state.metric is not None))


def test_a_callback_of_a_python_user_accompanies_each_update(tmp_path: Path) -> None:
    diary = Diary()
    settings = training_settings(runs.arguments(FIVE, "--update-freq 3 --max-update 3 --no-save --save-dir", tmp_path))
    assert train(settings, World(), Interruption(), [diary]) == 0
    expected = [
        ("begin", 0),
        ("epoch", 1),
        ("before", 0), ("after", 1, True), ("validate", False), ("complete", False, False),
        ("before", 1), ("after", 2, True), ("validate", True), ("complete", True, True),
        ("epoch", 2),
        ("before", 2), ("after", 3, True), ("validate", True), ("complete", False, True),
        ("end", 3, True),
    ]  # fmt: skip
    assert diary.calls == expected


PLUGIN = """
from fairseq.training import Callback, Limit, register_callback

@register_callback
class Enough(Callback):
    def __init__(self, settings):
        self.seed = settings.common.seed

    def after_update(self, state):
        if state.num_updates == self.seed:
            state.end = Limit("enough")
"""


def test_a_callback_of_a_plug_in_ends_a_run_which_is_validated_and_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(registered, "_FACTORIES", [])
    plugin = tmp_path / "with_callback"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(PLUGIN)
    log = runs.train(tmp_path / "run", FIVE, "--max-update 9 --seed 4 --no-epoch-checkpoints --user-dir", plugin)
    assert len(runs.updates(log)) == 4 and len(runs.summaries(log, "test")) == 1
    assert "enough is reached after 4 updates" in logged(caplog)
    assert runs.content(tmp_path / "run" / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 4


def test_ranks_decide_together_what_one_of_them_wishes(tmp_path: Path) -> None:
    class Slow(Callback):
        @contextlib.contextmanager
        def running(self, state: TrainingState) -> Iterator[None]:
            state.votes.register("slow", lambda: state.num_updates >= 2)
            yield

        def after_update(self, state: TrainingState) -> None:
            if state.votes["slow"]:
                state.end = Limit("patience with this machine")

    settings = training_settings(runs.arguments(FIVE, "--max-update 9 --no-save --save-dir", tmp_path))
    diary = Diary()
    train(settings, World(), callbacks=[Slow(), diary])
    assert diary.calls[-1] == ("end", 3, True), "the third update's votes are of two updates"


def test_registering_returns_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_FACTORIES", [])
    assert register_callback(lambda settings: Diary())
    assert len(registered.registered_callbacks(training_settings(runs.arguments(FIVE)))) == 1
