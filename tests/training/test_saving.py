"""Checkpoints are written as they are due, and those written in the background one after the
other."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from mistakes import user_error
from ranks import in_threads

from fairseq import checkpoint
from fairseq.checkpoint import manager
from fairseq.checkpoint.manager import SavePoint
from fairseq.checkpoint.store import save as write_checkpoint
from fairseq.config.settings import training_settings
from fairseq.distributed import Interruption, World
from fairseq.distributed.tensor_part import TensorPart
from fairseq.distributed.world import FILES
from fairseq.errors import UserError
from fairseq.training import saving, train
from fairseq.training.hooks import Hook
from fairseq.training.saving import Saver
from fairseq.training.state import TrainingState


class Disk:
    """A manager of checkpoints whose first file is written as soon as *open* is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.events: list[str] = []

    def due(self, point: SavePoint) -> list[Path]:
        return [Path(str(point.updates))]

    def save(self, state: dict[str, Any], paths: list[Path]) -> None:
        self.events.append(f"{paths[0]} begins")
        self.open.wait(runs.TIMEOUT)
        self.events.append(f"{paths[0]} ends")


def test_a_background_save_begins_when_the_one_before_has_ended() -> None:
    disk = Disk()
    saver = a_saver(disk, "--async-save")
    saver.save({}, SavePoint(1, 1))
    threading.Timer(0.1, disk.open.set).start()  # while the second save waits, or writes if it does not
    saver.save({}, SavePoint(1, 2))
    saver.wait()
    assert disk.events == ["1 begins", "1 ends", "2 begins", "2 ends"]


class Files(Disk):
    """A manager that records what it writes; a checkpoint is due unless *updates* is a multiple of
    10."""

    def __init__(self, error: UserError | None = None) -> None:
        super().__init__()
        self.open.set()
        self.error = error
        self.points: list[SavePoint] = []
        self.written: list[tuple[str, dict[str, Any]]] = []

    def due(self, point: SavePoint) -> list[Path]:
        self.points.append(point)
        return [] if point.updates % 10 == 0 else [Path(str(point.updates))]

    def save(self, state: dict[str, Any], paths: list[Path]) -> None:
        super().save(state, paths)
        if self.error is not None:
            raise self.error
        self.written.append((str(paths[0]), state))

    def save_as(self, name: str, state: dict[str, Any]) -> None:
        self.events.append(name)
        self.written.append((name, state))


def a_saver(manager: Any, flags: str = "", world: World | None = None) -> Saver:
    settings = training_settings(runs.arguments(runs.BASELINE, flags))
    return Saver(settings.checkpoint, settings.distributed, world or World(), manager)


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_what_is_due_is_written_as_the_manager_says(flags: str) -> None:
    files = Files()
    saver = a_saver(files, flags)
    state = {"model": {"w": torch.ones(2)}, "last_optimizer_state": {"m": torch.ones(2)}, "extra_state": {}}
    points = [SavePoint(3, 9, True, True, 2.5, "9.pt"), SavePoint(3, 10), SavePoint(3, 11, False, False, 3.0)]
    for point in points:
        saver.save(state, point)
    saver.wait()
    assert files.points == points
    assert [name for name, _ in files.written] == ["9", "11"], "nothing is due at update 10"
    assert all(runs.difference(written, state) is None for _, written in files.written)


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_the_optimizers_state_is_left_out_when_asked_and_nothing_else(flags: str) -> None:
    files = Files()
    saver = a_saver(files, f"{flags} --no-save-optimizer-state")
    state = {"model": {}, "last_optimizer_state": {"m": torch.ones(2)}, "extra_state": {"epoch": 1}}
    saver.save(state, SavePoint(1, 1))
    saver.wait()
    assert files.written == [("1", {"model": {}, "extra_state": {"epoch": 1}})]
    assert "last_optimizer_state" in state, "the caller's stays"


def test_a_background_save_is_that_of_its_update_whatever_training_does_meanwhile() -> None:
    files = Files()
    files.open.clear()
    saver = a_saver(files, "--async-save")
    weights = torch.ones(3)
    saver.save({"model": {"w": weights}}, SavePoint(1, 1))
    weights.fill_(2.0)  # the next update
    files.open.set()
    saver.wait()
    assert files.written[0][1]["model"]["w"].tolist() == [1.0] * 3


def test_a_save_that_training_waits_for_copies_nothing() -> None:
    files = Files()
    weights = torch.ones(3)
    a_saver(files).save({"model": {"w": weights}}, SavePoint(1, 1))
    assert files.written[0][1]["model"]["w"] is weights


def test_a_background_save_that_fails_ends_the_run_once_at_the_next_save() -> None:
    files = Files(UserError("no space"))
    saver = a_saver(files, "--async-save")
    saver.save({}, SavePoint(1, 1))
    with pytest.raises(UserError, match="no space"):
        saver.save({}, SavePoint(1, 2))
    assert files.events == ["1 begins", "1 ends"], "the second one is not begun"


class FullDisk:
    """Lets the save of *update*, and those after it, fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, update: int) -> None:
        self.update = update
        monkeypatch.setattr(manager, "save", self.save)

    def save(self, path: Path, state: dict[str, Any]) -> None:
        if state["optimizer_history"][-1]["num_updates"] >= self.update:
            time.sleep(0.2)  # training goes on
            raise UserError(f"{path}: cannot be written (No space left on device); free some space")
        write_checkpoint(path, state)


class SignalAt(Hook):
    """Asks the run to stop after an update."""

    def __init__(self, interruption: Interruption, update: int) -> None:
        self.interruption, self.update = interruption, update

    def on_update(self, state: TrainingState) -> None:
        if state.num_updates == self.update:
            self.interruption.signal = signal.SIGTERM


@pytest.mark.parametrize(
    ("fails", "signalled"), [(2, None), (3, None), (3, 3)], ids=["at the next save", "at the end", "by a signal"]
)
def test_a_background_save_that_fails_ends_the_run_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fails: int,
    signalled: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    FullDisk(monkeypatch, fails)
    flags = f"--async-save --save-interval-updates 1 --disable-validation --max-update {4 if signalled else 3}"
    settings = training_settings(runs.arguments(runs.BASELINE, "--save-dir", tmp_path, flags))
    interruption = Interruption()
    hooks = [SignalAt(interruption, signalled)] if signalled else []
    with user_error("cannot be written .No space left"):
        train(settings, World(), interruption, hooks)
    assert "cannot be written" not in caplog.text, "it is said once"
    last = checkpoint.load(tmp_path / "checkpoint_last.pt")
    assert last["optimizer_history"][-1]["num_updates"] == fails - 1, "the one before is intact"


def test_an_error_of_training_is_not_hidden_by_one_of_the_background_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Raises(Hook):
        def on_update(self, state: TrainingState) -> None:
            if state.num_updates == 2:
                raise UserError("a plug-in has ended")

    FullDisk(monkeypatch, 1)
    flags = "--async-save --save-interval-updates 1 --disable-validation"
    settings = training_settings(runs.arguments(runs.BASELINE, "--save-dir", tmp_path, flags))
    with user_error("a plug-in has ended"):
        train(settings, World(), hooks=[Raises()])
    assert "cannot be written (No space left" in caplog.text


def test_a_state_for_inspection_waits_for_the_save_before() -> None:
    files = Files()
    files.open.clear()
    saver = a_saver(files, "--async-save")
    saver.save({"n": 1}, SavePoint(1, 1))
    threading.Timer(0.1, files.open.set).start()
    saver.save_as("nonfinite.pt", {"n": 2}, 1, 1)
    assert files.events == ["1 begins", "1 ends", "nonfinite.pt"]
    assert files.written == [("1", {"n": 1}), ("nonfinite.pt", {"n": 2})]


def test_what_was_saved_is_logged_with_its_epoch_and_update(caplog: pytest.LogCaptureFixture) -> None:
    saver = a_saver(Files(UserError("no space")))
    with caplog.at_level(logging.INFO), pytest.raises(UserError):
        saver.save({}, SavePoint(2, 7))
    assert caplog.messages == [], "it was not saved"
    with caplog.at_level(logging.INFO):
        a_saver(Files()).save({}, SavePoint(2, 7))
    assert caplog.messages == ["saved 7 (epoch 2, update 7)"]


def test_a_process_that_is_not_the_first_writes_nothing() -> None:
    saver = a_saver(None, "--async-save")
    saver.save({}, SavePoint(1, 1))
    saver.save_as("nonfinite.pt", {}, 1, 1)
    saver.wait()
    assert saver.pending is None


# --- sharded training, whose processes write parts into one folder


class Folders(Files):
    """A manager of folders of parts; links are made when all parts are written."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @contextlib.contextmanager
    def saving_folder(self, paths: list[Path], epoch: int, updates: int) -> Iterator[Path]:
        self.events.append(f"{epoch} {updates} begins")
        yield self.folder / "parts"
        self.events.append(f"linked as {[path.name for path in paths]}")


@dataclasses.dataclass
class Sharded:
    """Savers of sharded runs, whose group and writing are recorded.

    Attributes:
        groups: settings of the process groups that are made.
        written: folder, plain state and parts of each writing.
    """

    groups: list[dict[str, Any]]
    written: list[tuple[Path, dict[str, Any], dict[str, Any]]]

    def saver(self, world: World, manager: Any, flags: str = "") -> Saver:
        return a_saver(manager, f"--distributed-timeout 7 {flags}", world)


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> Sharded:
    fake = Sharded([], [])

    def new_group(**settings: Any) -> str:
        fake.groups.append(settings)
        return "a group"

    def write(folder: Path, plain: dict[str, Any], own: dict[str, Any], group: Any) -> None:
        assert group == "a group"
        fake.written.append((folder, plain, own))

    monkeypatch.setattr(saving, "is_sharded", lambda cfg, world: True)
    monkeypatch.setattr(saving.dist, "new_group", new_group)
    monkeypatch.setattr(saving.sharded, "write", write)
    return fake


def a_sharded_state() -> tuple[dict[str, Any], TensorPart]:
    part = TensorPart(torch.ones(2, 3), 2, torch.Size([4, 3]))
    return {"model": {"w": part}, "last_optimizer_state": {"m": torch.ones(5)}, "n": torch.ones(1)}, part


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_the_parts_of_a_state_are_written_before_it_is_linked(sharded: Sharded, tmp_path: Path, flags: str) -> None:
    files = Folders(tmp_path)
    saver = sharded.saver(World(), files, flags)
    assert sharded.groups == [{"backend": "gloo", "timeout": FILES}], "threads have a group of their own"
    state, part = a_sharded_state()
    saver.save(state, SavePoint(2, 11))
    saver.wait()
    ((folder, plain, own),) = sharded.written
    assert folder == tmp_path / "parts" and list(own) == ["model/w"]
    assert torch.equal(own["model/w"].local, part.local) and own["model/w"].first == 2
    assert plain["model"] == {"w": None} and plain["n"].tolist() == [1.0] and "last_optimizer_state" in plain
    assert files.events == ["2 11 begins", "linked as ['11']"]
    copied = own["model/w"].local.data_ptr() != part.local.data_ptr()
    assert copied is bool(flags) and (plain["n"].data_ptr() != state["n"].data_ptr()) is bool(flags)
    sharded.written.clear()
    saver.save(state, SavePoint(2, 20))
    saver.wait()
    assert sharded.written == [] and len(files.events) == 2, "nothing is due"


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_every_process_writes_into_the_folder_of_the_first(
    sharded: Sharded, tmp_path: Path, flags: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def save(world: World) -> None:
        saver = sharded.saver(world, Folders(tmp_path) if world.is_first else None, flags)
        for updates in (11, 20):
            saver.save(a_sharded_state()[0], SavePoint(1, updates))
        saver.wait()

    assert in_threads(save, 3) == [None] * 3
    assert [folder for folder, _, _ in sharded.written] == [tmp_path / "parts"] * 3
    assert all(list(own) == ["model/w"] for _, _, own in sharded.written)
    assert sorted(bool(plain) for _, plain, _ in sharded.written) == ([False, False, True] if flags else [True] * 3)
    assert caplog.messages == ["saved 11 (epoch 1, update 11)"]


def test_a_sharded_state_for_inspection_is_written_at_once(sharded: Sharded, tmp_path: Path) -> None:
    files = Folders(tmp_path)
    state, part = a_sharded_state()
    saver = sharded.saver(World(), files, "--async-save")
    saver.save_as("nonfinite.pt", state, 3, 8)
    ((folder, _, own),) = sharded.written
    assert own["model/w"] is part and saver.pending is None and folder == tmp_path / "parts"
    assert files.events == ["3 8 begins", "linked as ['nonfinite.pt']"]


def test_every_process_takes_part_in_a_state_for_inspection(sharded: Sharded, tmp_path: Path) -> None:
    def save(world: World) -> None:
        saver = sharded.saver(world, Folders(tmp_path) if world.is_first else None)
        saver.save_as("nonfinite.pt", a_sharded_state()[0], 3, 8)

    assert in_threads(save, 2) == [None] * 2
    assert [folder for folder, _, _ in sharded.written] == [tmp_path / "parts"] * 2


def test_a_sharded_run_of_one_process_saves_whole_files() -> None:
    assert a_saver(None, "--ddp-backend fully_sharded").group is None
