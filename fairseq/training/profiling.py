"""Profile of some updates of a run: a trace,
a table of operators and, on a GPU, a memory snapshot."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fairseq.distributed import World
from fairseq.errors import SettingError
from fairseq.modules import devices
from fairseq.system.files import atomic_folder, prepare_folder

logger = logging.getLogger(__name__)

FOLDER = "profile"  # in --save-dir
FILES = ("operators.txt", "memory.pickle", "trace.json")
OPERATORS = 40  # rows of the table
ALLOCATIONS = 200_000  # most entries of the memory snapshot

Observer = Callable[[int], contextlib.AbstractContextManager[object]]
"""Given the number of updates done, a context for the next update."""


@dataclass(frozen=True)
class Window:
    """The updates after *first*, up to and including *last*."""

    first: int
    last: int


def parse_window(text: str | None, max_update: int) -> Window | None:
    """The updates that the value *text* of ``--profile`` asks for, e.g. ``10:13``; None without it.

    Raises:
        UserError: *text* is malformed, empty or beyond
            *max_update*, the last update of the run; 0: no limit.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,10})\s*:\s*(\d{1,10})\s*", text, re.ASCII)
    if match is None:
        raise SettingError(f"`profile` {text}: expected FROM:TO, two numbers of updates such as 10:13")
    first, last = int(match[1]), int(match[2])
    if first >= last:
        raise SettingError(f"`profile` {text}: FROM must be less than TO; {first}:{first + 3} profiles three updates")
    if 0 < max_update < last:
        raise SettingError(f"`profile` {text}: beyond the last update, {max_update}; give TO up to {max_update}")
    return Window(first, last)


@contextlib.contextmanager
def profiling(window: Window | None, save_dir: str, world: World) -> Iterator[Observer]:
    """An observer of updates that writes the profile
    of *window* to *save_dir*, on the first process.

    A run that ends or resumes inside the window profiles its part of it. Without a window the
    observer does nothing.

    Raises:
        UserError: the folder cannot be written.
    """
    if window is None or not world.is_first:
        yield contextlib.nullcontext
        return
    folder = Path(save_dir) / FOLDER
    prepare_folder("`profile`", folder)
    profiler = _Profiler(window, folder, world.device)
    try:
        yield profiler.update
        profiler.finish()
    finally:
        profiler.abandon()


@dataclass
class _Profiler:
    """Profiles a window of updates once."""

    window: Window
    folder: Path
    device: torch.device
    first: int = 0
    updates: int = 0
    finished: bool = False
    running: profile | None = None

    @contextlib.contextmanager
    def update(self, done: int) -> Iterator[None]:
        """Context of the update after *done* ones; updates
        that are repeated after an overflow are counted, too."""
        if self.running is None and not self.finished and self.window.first <= done < self.window.last:
            self._start(done)
        yield
        if self.running is not None:
            self.updates += 1
            if done + 1 >= self.window.last:
                self.finish()

    def finish(self) -> None:
        """Write what was profiled, if anything was."""
        if self.running is None:
            return
        profiled = self.running
        profiled.stop()
        # A run killed while it writes leaves the profile of an earlier run complete.
        with atomic_folder(self.folder, FILES, "`profile`") as folder:
            operators, memory, trace = (folder / name for name in FILES)
            profiled.export_chrome_trace(str(trace))
            operators.write_text(self._table(profiled), encoding="utf-8")
            devices.write_allocations(self.device, str(memory))
        self._stop_recording()
        logger.info("profile of %d updates from %d on: %s", self.updates, self.first + 1, self.folder)

    def abandon(self) -> None:
        """Stop profiling without a result, if it runs."""
        if self.running is not None:
            self.running.stop()
            self._stop_recording()

    def _start(self, done: int) -> None:
        self.first = done
        # Recorded from here on only: the history of allocations costs time and memory.
        devices.record_allocations(self.device, ALLOCATIONS)
        kernels = devices.profiler_activity(self.device)
        self.running = profile(activities=[ProfilerActivity.CPU, *([] if kernels is None else [kernels])])
        self.running.start()

    def _stop_recording(self) -> None:
        self.running, self.finished = None, True
        devices.record_allocations(self.device, None)

    def _table(self, profiled: profile) -> str:
        """The operators that took most time on the device, and their sums."""
        sort = "self_cpu_time_total" if devices.profiler_activity(self.device) is None else "self_device_time_total"
        table = profiled.key_averages().table(sort_by=sort, row_limit=OPERATORS, max_name_column_width=70)
        return f"{self.updates} updates from {self.first + 1} on; {self.device}, torch {torch.__version__}\n{table}\n"
