"""Signals that ask a run to stop: recorded as a value that the run polls between updates."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Of a run that stopped and saved, or whose output nobody reads.
EXIT_CODES = {128 + number: signal.Signals(number).name for number in (*SIGNALS, signal.SIGPIPE)}


class Interruption:
    """The signal that asked this process to stop, if one did, inside a ``with`` statement.

    The first of SIGINT, SIGTERM and SIGUSR1 is recorded, and rank 0 says what follows. A second one
    ends the process at once with 128 + its number, unless our launcher counts signals, or torchrun
    repeats them. A signal that is ignored by inheritance (``nohup``, a script's background job)
    stays ignored.

    Args:
        saves: whether the run saves what it can go on from.
    """

    def __init__(self, saves: bool = True) -> None:
        self.signal, self.saves = 0, saves
        self.second_ends = multiprocessing.parent_process() is None and "TORCHELASTIC_RUN_ID" not in os.environ
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        # No other thread may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            if self.second_ends:
                # Not sys.exit: whoever asks twice does not want to wait for handlers and threads.
                os._exit(128 + number)
            return
        self.signal = number
        if os.environ.get("RANK", "0") == "0":
            stops = "saves and stops" if self.saves else "stops, without a checkpoint to go on from,"
            line = f"{signal.Signals(number).name}: the run {stops} after this update or validation"
            if multiprocessing.parent_process() is not None or self.second_ends:
                line += "; a second signal ends it at once"
                line += ", and loses what was not saved" if self.saves else ""
            # Not print, which the signal may have interrupted; after a line of a progress bar.
            os.write(2, f"\n{line}\n".encode())


def end_at_signals() -> None:
    """Let a signal end this worker at once, with 128 plus its number, unless it has no launcher.

    For work that does not poll :class:`Interruption`.
    """
    if multiprocessing.parent_process() is not None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                # Not sys.exit: it would be lost where a generator or a destructor is interrupted.
                signal.signal(number, lambda number, frame: os._exit(128 + number))
