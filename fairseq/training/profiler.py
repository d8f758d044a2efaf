"""The profile of some updates, with ``--profile``: a trace,
a table of operators and, on a GPU, a memory snapshot."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fairseq.errors import SettingError
from fairseq.modules import devices
from fairseq.system.files import atomic_folder, prepare_folder

logger = logging.getLogger(__name__)

FOLDER = "profile"  # in --save-dir
FILES = ("operators.txt", "memory.pickle", "trace.json")
OPERATORS = 40  # rows of the table
ALLOCATIONS = 200_000  # most entries of the memory snapshot


def parse_window(text: str | None, max_update: int) -> tuple[int, int] | None:
    """The updates that the value *text* of ``--profile`` asks for, e.g. ``10:13`` for those after
    10 up to 13; None without it.

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
        text = f"{first}:{last}"
        raise SettingError(f"`profile` {text}: beyond the last update, {max_update}; give TO up to {max_update}")
    return first, last


class Profiler:
    """Profiles the updates of *window*, if there is one; a run that ends or resumes inside the
    window profiles its part of it.

    Raises:
        UserError: the folder in *save_dir* cannot be written.
    """

    def __init__(self, window: tuple[int, int] | None, save_dir: str, device: torch.device) -> None:
        self.window = window
        self.folder = Path(save_dir) / FOLDER
        self.device = device
        self.profile: profile | None = None
        self.first = self.last = 0
        if window is not None:
            prepare_folder("`profile`", self.folder)

    def before_update(self, updates: int) -> None:
        """Begin or end the profile before the update after *updates*."""
        if self.window is None:
            return
        if self.profile is None and self.window[0] <= updates < self.window[1]:
            self.first = updates + 1
            # Recorded from here on only: the history of allocations costs time and memory.
            devices.record_allocations(self.device, ALLOCATIONS)
            kernels = devices.profiler_activity(self.device)
            self.profile = profile(activities=[ProfilerActivity.CPU, *([] if kernels is None else [kernels])])
            self.profile.start()
        elif updates >= self.window[1]:
            self.finish(updates)

    def finish(self, updates: int) -> None:
        """Write what was profiled up to *updates*, if anything was; it is the only profile of the
        run."""
        profiled = self.profile
        if profiled is None:
            return
        profiled.stop()
        sort = "self_cpu_time_total" if devices.profiler_activity(self.device) is None else "self_device_time_total"
        table = profiled.key_averages().table(sort_by=sort, row_limit=OPERATORS, max_name_column_width=70)
        head = f"updates {self.first} to {updates}; {self.device}, torch {torch.__version__}"
        # A run killed while it writes leaves the profile of an earlier run complete.
        with atomic_folder(self.folder, FILES, "`profile`") as folder:
            operators, memory, trace = (folder / name for name in FILES)
            profiled.export_chrome_trace(str(trace))
            operators.write_text(f"{head}\n{table}\n", encoding="utf-8")
            devices.write_allocations(self.device, str(memory))
        self.profile = self.window = None
        devices.record_allocations(self.device, None)
        logger.info("profile of updates %d to %d: %s", self.first, updates, self.folder)

    def drop(self) -> None:
        """End a profile that an error cut short, without a result: torch has one at a time."""
        if self.profile is not None:
            self.profile.stop()
            self.profile = self.window = None
            devices.record_allocations(self.device, None)
