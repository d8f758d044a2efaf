"""Threads only save time: a run that may start none, as under ``ulimit -u``, trains as any."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import runs

from fairseq.config.options import run_program


def test_a_run_that_can_start_no_thread_trains_as_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{runs.SHORTFORMER} --max-update 3 --save-interval-updates 2 --async-save"
    folders = f"{runs.DATA}:{runs.DATA}"  # the second is opened in the background
    logs: list[list[dict[str, object]]] = []

    def train(save_dir: Path) -> None:
        logs.append(runs.updates(runs.train(save_dir, flags, data=Path(folders))))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    train(tmp_path / "with")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    run_program(lambda: train(tmp_path / "without"))
    assert logs[0] == logs[1] and len(logs[0]) == 3
    names = [sorted(path.name for path in (tmp_path / name).glob("*.pt")) for name in ("with", "without")]
    assert names[0] == names[1] and "checkpoint_last.pt" in names[0]
