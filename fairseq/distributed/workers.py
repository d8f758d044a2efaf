"""Worker processes of one machine: started together, ended together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from types import FrameType
from typing import Any, NoReturn

import torch

from fairseq.distributed.interruption import EXIT_CODES, SIGNALS
from fairseq.system.workers import watch_parent

USER_ERROR = 2
# More would not fit into a pipe that nobody reads.
_LONGEST_MESSAGE = 20_000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """The end of a worker that ends the job: its rank, the job's exit code, and the reason ("" after a signal)."""

    rank: int
    code: int
    reason: str


class Workers:
    """Processes that run ``target(messages, rank, local_rank, *args)``, inside a ``with`` statement.

    SIGINT, SIGTERM and SIGUSR1 are passed on to them, and they decide what to do; a second signal kills them and ends
    this process. Leaving the statement kills those that are left. As pickle needs it, *target* is a module's function.
    """

    def __init__(self, target: Callable[..., None], first: int, count: int, args: tuple[Any, ...]) -> None:
        # CUDA does not survive a fork.
        context = torch.multiprocessing.get_context("spawn")
        self.first = first
        self.messages: SimpleQueue[Failure] = context.SimpleQueue()
        self.processes = [
            context.Process(target=target, args=(self.messages, first + index, index, *args)) for index in range(count)
        ]
        self.signal = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Workers:
        if threading.current_thread() is threading.main_thread():
            # Workers inherit the mask: what reaches them during their imports waits until they can handle it.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._pass_on)
        try:
            for process in self.processes:
                process.start()
        except BaseException:
            self.__exit__()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        started = [process for process in self.processes if process.pid is not None]
        for process in started:
            # Not SIGTERM, which a stopped process never sees and a running one takes as a request.
            process.kill()
        for process in started:
            process.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> Failure | None:
        """Wait until all have ended well (None), all have stopped after a signal, or one has failed."""
        while True:
            codes = [process.exitcode for process in self.processes]
            # A process whose output nobody reads has left the others: in training they stop after the same update.
            left = 128 + signal.SIGPIPE in codes and not self.messages.empty()
            if left or any(code and code not in EXIT_CODES for code in codes):
                return self._failure([process.exitcode for process in self.processes])
            ended = [code for code in codes if code is not None]
            if len(ended) == len(codes):
                stopped = max(ended)
                return Failure(self.first + codes.index(stopped), stopped, "") if stopped else None
            time.sleep(0.05)

    def _failure(self, codes: list[int | None]) -> Failure:
        killed = [number for number, code in enumerate(codes) if code not in (None, 0, 1, USER_ERROR, *EXIT_CODES)]
        # The messages of the other processes only tell that it is gone.
        if killed:
            code = codes[killed[0]] or 0
            reason = f"killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
            return Failure(self.first + killed[0], 1, reason)
        if not self.messages.empty():
            return self.messages.get()
        number = next(number for number, code in enumerate(codes) if code in (1, USER_ERROR))
        return Failure(self.first + number, 1, "exited without an error message")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            # The end of the with statement kills the workers.
            sys.exit(128 + number)
        self.signal = number
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def leave(messages: SimpleQueue[Failure], failure: Failure) -> NoReturn:
    """Report *failure*, and end this process at once, whatever the others are waiting for."""
    messages.put(replace(failure, reason=failure.reason[-_LONGEST_MESSAGE:]))
    # Not sys.exit: threads of a collective may wait for processes that are gone.
    os._exit(failure.code)


def end_with_launcher() -> None:
    """Let this worker end when the launcher does, however it went: on Linux even while this worker is stopped."""
    if sys.platform.startswith("linux"):
        # From the kernel, so that it also ends a worker that is stopped.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    watch_parent()


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
