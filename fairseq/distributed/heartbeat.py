"""Heartbeats: a job ends, and says why, when one of its processes stops responding."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from fairseq.distributed.workers import USER_ERROR, Failure

_TICKS = 10  # heartbeats in a timeout
# Heartbeats missed before a process counts as stopped, so that it is said before reductions time out.
_MISSED = 7
_PACKAGE = Path(__file__).parents[2]
_NOT_OURS = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"])
_FAILURE = "failure"
_WAITING = "waiting"


class Heartbeat:
    """A thread that tells the other processes of a job that this one runs, and ends it if another does not.

    Every process writes a counter to *store*. Rank 0 watches all, the others watch rank 0 and the key under which a
    failure is published, so the traffic grows with the number of processes, not with its square.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: float, fail: Callable[[Failure], None]
    ) -> None:
        # A connection of its own: the thread must not wait for another's request.
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout  # seconds without a heartbeat after which a process counts as stopped
        self.fail = fail  # called with the failure that ends the job; must not return
        self.stopped = threading.Event()
        self.watched = [other for other in range(size) if other != rank] if rank == 0 else [0]
        self.main = threading.main_thread().ident
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        # The host of the store may stop as well: its silence counts like a process's.
        store.set_timeout(timedelta(seconds=timeout * _MISSED / _TICKS))
        store.set(self._key(rank), "0 ")
        if rank == 0:
            store.set(_FAILURE, "")

    def start(self) -> None:
        """Begin; every process must have made its heartbeat by then."""
        self.thread.start()

    def stop(self) -> None:
        """End the thread; from now on silence of any process is no failure."""
        self.stopped.set()
        self.thread.join(self.timeout)

    def explain(self, error: BaseException) -> Failure | None:
        """Return the failure of another process because of which *error* was raised here; None if this one is at fault.

        Call it in the thread that raised *error*: heartbeats end with it.
        """
        if not _is_lost_connection(error):
            return None
        self.stopped.set()
        try:
            # Who saw the cause publishes it in a moment.
            for _ in range(1 if _is_timeout(error) else 20):
                published = self._published()
                if published is not None:
                    return published
                time.sleep(0.1)
            values = self._read([self._key(rank) for rank in range(self.size)])
        except RuntimeError:
            return None
        positions = {rank: value.partition(" ")[2] for rank, value in enumerate(values) if rank != self.rank}
        busy = [rank for rank, position in positions.items() if position not in ("", _WAITING)]
        # A process that waits, too, is not at fault.
        if not _is_timeout(error) or not busy:
            return None
        reason = f"hangs at {positions[busy[0]]}: the others waited {self.timeout:g} s for it (`distributed_timeout`)"
        return self._publish(Failure(busy[0], 1, reason))

    def report(self, failure: Failure) -> None:
        """Tell the other processes that this one fails, and why."""
        self.stopped.set()
        # The store's host may be what failed.
        with contextlib.suppress(RuntimeError):
            self._publish(failure)

    def _run(self) -> None:
        counts: dict[int, tuple[str, int]] = {}
        beat = 0
        while not self.stopped.wait(self.timeout / _TICKS):
            beat += 1
            try:
                self.store.set(self._key(self.rank), f"{beat} {self._position()}")
                values = self._read([self._key(other) for other in self.watched])
                published = self._published()
            # The store's host is gone, or does not answer.
            except RuntimeError:
                if not self.stopped.wait(min(self.timeout / _TICKS, 2.0)):
                    self.fail(Failure(0, 1, "the rendezvous does not respond: its process has ended or is stopped"))
                return
            if published is not None and not self.stopped.is_set():
                self.fail(published)
            for other, value in zip(self.watched, values, strict=True):
                before, missed = counts.get(other, ("", 0))
                # Ticks of this thread, not seconds: a job that was suspended as a whole goes on when it is resumed.
                missed = missed + 1 if value == before else 0
                counts[other] = (value, missed)
                if missed >= _MISSED and not self.stopped.is_set():
                    seconds = self.timeout * _MISSED / _TICKS
                    reason = f"no heartbeat for {seconds:g} s: it is stopped, or its machine is unreachable"
                    self.fail(self._publish(Failure(other, 1, reason)))

    def _publish(self, failure: Failure) -> Failure:
        """Tell every process of a failure; returns the first one that was published."""
        publish_failure(self.store, failure)
        return self._published() or failure

    def _published(self) -> Failure | None:
        value = self._read([_FAILURE])[0]
        rank, code, reason = value.split(" ", 2) if value else ("", "", "")
        return Failure(int(rank), int(code), reason) if value else None

    def _read(self, keys: list[str]) -> list[str]:
        return [value.decode() for value in self.store.multi_get(keys)]

    def _key(self, rank: int) -> str:
        return f"heartbeat/{rank}"

    def _position(self) -> str:
        """File and line that the main thread is at, or that it waits for other processes."""
        frame: FrameType | None = sys._current_frames().get(self.main or 0)
        waiting = False
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_OURS):
            waiting = waiting or "distributed" in frame.f_code.co_filename
            frame = frame.f_back
        if waiting or frame is None:
            return _WAITING
        file = Path(frame.f_code.co_filename)
        return f"{file.relative_to(_PACKAGE) if file.is_relative_to(_PACKAGE) else file}:{frame.f_lineno}"


def publish_failure(store: dist.Store, failure: Failure) -> None:
    """Tell every process that watches *store* of *failure*, unless another was first; of a traceback the last line."""
    reason = failure.reason.strip()
    line = " ".join(reason.split()) if failure.code == USER_ERROR else reason.rpartition("\n")[2]
    store.compare_set(_FAILURE, "", f"{failure.rank} {failure.code} {line}")


def _is_timeout(error: BaseException) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether *error* comes from a reduction that another process did not take part in."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in text for words in ("timed out", "timeout", "connection closed", "connection reset", "gloo", "nccl")
    )
