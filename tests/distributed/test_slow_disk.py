"""Files take longer than collectives may: processes wait for the one that reads or writes them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import runs
from launches import free_port, in_processes, job

from fairseq import checkpoint
from fairseq.checkpoint import CheckpointManager, manager
from fairseq.config.settings import training_settings
from fairseq.distributed import World, run
from fairseq.training import train

pytestmark = pytest.mark.usefixtures("forked")

LIMIT, WRITING = 3.0, 4.5  # seconds
FLAGS = [runs.BASELINE, "--max-tokens 32 --max-update 2 --disable-validation"]
SHARDED = "--ddp-backend fully_sharded --optimizer adam"


def slowly(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let the first call of the function *name* of *owner* take longer than the limit of
    collectives."""
    original, pauses = getattr(owner, name), [WRITING]

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(pauses.pop() if pauses else 0)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)


def on_two(folder: Path, *flags: Any) -> None:
    """Train on two processes, whose collectives end after LIMIT seconds."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def main(value: Any, world: World) -> None:
        train(training_settings(runs.arguments(FLAGS, "--save-dir", folder, *flags)), world)

    def rank(number: int) -> Any:
        def start() -> None:
            os.environ.update(place, RANK=str(number))
            run(job(main, number, distributed_timeout=LIMIT))

        return start

    assert [code for code, _ in in_processes(rank(0), rank(1), fail=True)] == [0, 0]


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_a_file_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str) -> None:
    slowly(monkeypatch, CheckpointManager, "save")
    on_two(tmp_path, flags, "--save-interval-updates 1")
    assert checkpoint.load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 2


@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_a_folder_of_parts_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str) -> None:
    slowly(monkeypatch, manager, "point_to")
    on_two(tmp_path, SHARDED, flags)
    assert checkpoint.load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 2


def test_a_checkpoint_is_verified_before_a_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_two(tmp_path)
    slowly(monkeypatch, checkpoint, "verify")
    on_two(tmp_path, "--max-update 3")
    assert checkpoint.load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == 3
