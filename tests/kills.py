"""Kills of runs at random instants, for tests."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import runs

from fairseq.system import files

KILLS = int(os.environ.get("FAIRSEQ_TEST_KILLS", "2"))


class Started(Protocol):
    """A process or several: ``poll`` returns None while all run, like that of
    ``subprocess.Popen``."""

    def poll(self) -> int | None: ...


def chance() -> random.Random:
    """Random numbers that FAIRSEQ_TEST_SEED repeats."""
    return random.Random(os.environ.get("FAIRSEQ_TEST_SEED", "1"))


def wait_for(path: Path, process: Started, seconds: float = runs.TIMEOUT) -> float:
    """Wait until the checkpoint at *path* changes, or the process ends; returns how long it
    took."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() < begin + seconds:
        if path.exists() and path.stat().st_mtime_ns != before:
            break
        time.sleep(0.002)
    return time.monotonic() - begin


def let_it_run(path: Path, process: Started, chance: random.Random, early: bool) -> None:
    """Return at a random instant: before the third checkpoint, or *early*, wherever the process is
    after its start."""
    if early:
        time.sleep(1.5 * chance.random())
        return
    interval = [wait_for(path, process) for _ in range(chance.randint(1, 2))][-1]
    time.sleep(interval * chance.random())


def wait_for_children(process: subprocess.Popen[str], word: str, number: int, besides: Sequence[int]) -> list[int]:
    """Wait for *number* child processes whose command line has *word*, other than *besides*; fewer
    if *process* ends."""
    found: list[int] = []
    end = time.monotonic() + runs.TIMEOUT
    while len(found) < number and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
        found = [child for child in _children(process.pid, word) if child not in besides]
    return found


def _children(pid: int, word: str) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # a thread or a child has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = map(int, (task / "children").read_text().split())
            found += [child for child in children if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]
    return found


def leftover(path: Path) -> Path:
    """A temporary name that a killed process of this host gave to what was to become *path*."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return path.with_name(f".{path.name}.{files._HOST}.{child}.0badcafe.tmp")
