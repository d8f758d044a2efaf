"""Hooks: what a plug-in or a Python user adds to a run."""

from __future__ import annotations

import contextlib
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import runs
from small_runs import FIVE

from fairseq.config.settings import training_settings
from fairseq.distributed import World
from fairseq.training import Hook, hooks, register_hook, train


class Watch(Hook):
    """Notes what it is called for, and ends the run after update *last*."""

    def __init__(self, last: int = 99) -> None:
        self.calls: list[Any] = []
        self.last = last

    def on_start(self, state: Any) -> None:
        self.calls.append(("start", state.num_updates))

    def on_update(self, state: Any) -> None:
        self.calls.append(state.num_updates)
        if state.num_updates == self.last:
            state.end = "the end of patience"

    def on_validate(self, state: Any) -> None:
        self.calls.append(("validate", state.num_updates, state.metric is not None))

    def on_end(self, state: Any) -> None:
        self.calls.append(("end", state.num_updates, state.end))


def run(folder: Path, flags: str, *watches: Hook) -> None:
    settings = training_settings(runs.arguments(FIVE, flags, "--save-dir", folder))
    with contextlib.redirect_stdout(io.StringIO()):
        train(settings, World(), hooks=watches)


def test_a_hook_is_called_for_the_start_each_update_validations_and_the_end(tmp_path: Path) -> None:
    watch = Watch()
    run(tmp_path, "--stages 16:2,32:3 --validate-interval-updates 2 --no-save", watch)
    stages = "the end of `stages` 16:2,32:3"
    assert watch.calls == [
        *(("start", 0), 1, 2, ("validate", 2, True), ("end", 2, stages)),
        *(("start", 2), 3, ("validate", 3, True), ("end", 3, stages)),
    ]


def test_a_registered_hook_ends_a_run_which_is_validated_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_FACTORIES", [])
    watch = Watch(last=2)
    made: list[Any] = []

    @register_hook
    def factory(settings: Any) -> Watch:
        made.append(settings)
        return watch

    run(tmp_path, "--max-update 9")
    assert made[0].optimization.max_update == 9
    assert watch.calls == [("start", 0), 1, 2, ("validate", 2, True), ("end", 2, "the end of patience")]
    assert runs.content(tmp_path / "checkpoint_best.pt")["optimizer_history"][-1]["num_updates"] == 2


def test_a_hook_may_end_a_run_before_its_first_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Ends(Watch):
        def on_start(self, state: Any) -> None:
            super().on_start(state)
            state.end = "the budget"

    caplog.set_level("INFO")
    for flags, last in (("--max-update 9", 0), ("--stages 16:2,32:3", 0)):
        watch = Ends()
        run(tmp_path, flags, watch)
        assert watch.calls == [("start", last), ("end", last, "the budget")]
        assert not list(tmp_path.glob("*.pt"))
    assert caplog.text.count("nothing to do: the budget is reached after 0 updates") == 2


def test_what_lives_until_the_end_of_a_run_is_not_searched_for_garbage(tmp_path: Path) -> None:
    class Frozen(Hook):
        def on_update(self, state: Any) -> None:
            counts.append(gc.get_freeze_count())

    counts: list[int] = []
    gc.unfreeze()
    try:
        run(tmp_path, "--max-update 2 --no-save --disable-validation", Frozen())
        assert min(counts) > 10_000 and gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # the tests themselves, as before
