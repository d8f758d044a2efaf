"""The profile of some updates, with ``--profile``: a trace,
a table of operators and, on a GPU, a memory snapshot."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fairseq.errors import SettingError
from fairseq.modules import devices
from fairseq.system.files import atomic_folder, prepare_folder
from fairseq.training.callbacks.callback import Callback
from fairseq.training.state import TrainingState

logger = logging.getLogger(__name__)

FOLDER = "profile"  # in --save-dir
FILES = ("operators.txt", "memory.pickle", "trace.json")
OPERATORS = 40  # rows of the table
ALLOCATIONS = 200_000  # most entries of the memory snapshot


@dataclass(frozen=True)
class Window:
    """The updates after *first*, up to and including *last*."""

    first: int
    last: int

    def check(self, max_update: int) -> None:
        """Raise SettingError if they go beyond *max_update*, the last one of the run; 0: no
        limit."""
        if 0 < max_update < self.last:
            text = f"{self.first}:{self.last}"
            raise SettingError(f"`profile` {text}: beyond the last update, {max_update}; give TO up to {max_update}")


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
    window = Window(first, last)
    window.check(max_update)
    return window


class Profiler(Callback):
    """Profiles the updates of *window*, if there is one, on the first process.

    A run that ends or resumes inside the window profiles its part of it. An update that is repeated
    after an overflow is counted each time.

    Raises:
        UserError: the folder in *save_dir* cannot be written.
    """

    def __init__(self, window: Window | None, save_dir: str) -> None:
        self.window = window
        self.folder = Path(save_dir) / FOLDER
        self.profile: profile | None = None
        self.device = torch.device("cpu")
        self.first = self.updates = self.done = 0

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        self.device = state.world.device
        if self.window is not None:
            self.window.check(state.cfg.max_update)  # which may follow from the data
        if not state.world.is_first:
            self.window = None
        if self.window is not None:
            prepare_folder("`profile`", self.folder)
        try:
            yield
            self.write()
        finally:
            if self.profile is not None:
                self.profile.stop()
                self._end()

    def before_update(self, state: TrainingState) -> None:
        self.done = state.num_updates
        if self.profile is None and self.window is not None and self.window.first <= self.done < self.window.last:
            self.first = self.done + 1
            # Recorded from here on only: the history of allocations costs time and memory.
            devices.record_allocations(self.device, ALLOCATIONS)
            kernels = devices.profiler_activity(self.device)
            self.profile = profile(activities=[ProfilerActivity.CPU, *([] if kernels is None else [kernels])])
            self.profile.start()

    def after_update(self, state: TrainingState) -> None:
        self.updates += self.profile is not None
        if self.window is not None and self.done + 1 >= self.window.last:
            self.write()

    def write(self) -> None:
        """Write what was profiled, if anything was; it is the only profile of the run."""
        if self.profile is None:
            return
        profiled = self.profile
        profiled.stop()
        # A run killed while it writes leaves the profile of an earlier run complete.
        with atomic_folder(self.folder, FILES, "`profile`") as folder:
            operators, memory, trace = (folder / name for name in FILES)
            profiled.export_chrome_trace(str(trace))
            operators.write_text(self._table(profiled), encoding="utf-8")
            devices.write_allocations(self.device, str(memory))
        self._end()
        logger.info("profile of %d updates from %d on: %s", self.updates, self.first, self.folder)

    def _end(self) -> None:
        self.window = self.profile = None
        devices.record_allocations(self.device, None)

    def _table(self, profiled: profile) -> str:
        """The operators that took most time on the device, and their sums."""
        sort = "self_cpu_time_total" if devices.profiler_activity(self.device) is None else "self_device_time_total"
        table = profiled.key_averages().table(sort_by=sort, row_limit=OPERATORS, max_name_column_width=70)
        return f"{self.updates} updates from {self.first} on; {self.device}, torch {torch.__version__}\n{table}\n"
