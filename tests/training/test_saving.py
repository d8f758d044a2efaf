"""Checkpoints written in the background come one after the other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import runs

from fairseq.distributed import World
from fairseq.tasks.typed import training_settings
from fairseq.training.saving import Saver


class Disk:
    """A manager of checkpoints whose first file is written as soon as *open* is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.events: list[str] = []

    def due(self, *, updates: int, **_: Any) -> list[Path]:
        return [Path(str(updates))]

    def save(self, state: dict[str, Any], paths: list[Path]) -> None:
        self.events.append(f"{paths[0]} begins")
        self.open.wait(runs.TIMEOUT)
        self.events.append(f"{paths[0]} ends")


def test_a_background_save_begins_when_the_one_before_has_ended() -> None:
    disk = Disk()
    settings = training_settings(runs.arguments(runs.BASELINE, "--async-save"))
    saver = Saver(settings, World(), disk)  # type: ignore[arg-type]
    saver.save({}, epoch=1, updates=1, end_of_epoch=False, is_best=False)
    threading.Timer(0.1, disk.open.set).start()  # while the second save waits, or writes if it does not
    saver.save({}, epoch=1, updates=2, end_of_epoch=False, is_best=False)
    saver.wait()
    assert disk.events == ["1 begins", "1 ends", "2 begins", "2 ends"]
