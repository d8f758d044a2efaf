"""One task over many pieces of work, in this process
or in several, with results in the order of the work."""

from __future__ import annotations

import collections
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Generic, TypeVar

from fairseq.errors import UserError
from fairseq.system.plugins import import_user_module, imported_folders

R = TypeVar("R")


class Workers(Generic[R]):
    """Runs one task, picklable, in this process or in *count*; a context manager that keeps
    processes between uses."""

    def __init__(self, task: Callable[..., R], count: int) -> None:
        self._task = task
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers[R]:
        if self.count > 1:
            # A fork of a process with threads, such as torch's, may hang. The task is pickled here
            # and read by the worker only after its plug-ins are imported.
            context = multiprocessing.get_context("spawn")
            arguments = imported_folders(), pickle.dumps(self._task)
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_set_task, initargs=arguments)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            # After an error work that waits in the queue is not done.
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def map(self, work: Iterable[tuple[object, ...]]) -> Iterator[R]:
        """Yield ``task(*arguments)`` for each of *work*,
        in order; raise UserError if a process died."""
        if self._pool is None:
            for arguments in work:
                yield self._task(*arguments)
            return
        # Bound the pieces in flight: they, and finished results, wait in memory until their turn.
        waiting: collections.deque[Future[R]] = collections.deque()
        try:
            for arguments in work:
                waiting.append(self._pool.submit(_run_task, *arguments))
                if len(waiting) >= 2 * self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(f"`workers` {self.count}: a process died, possibly out of memory; use fewer") from None


_process_task: Callable[..., object]


def _set_task(plugins: list[str], pickled: bytes) -> None:
    """Initialise a worker process."""
    global _process_task
    # Ctrl-C, which a terminal sends to all processes, ends a worker without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before the task is read, which may name classes of the plug-ins.
    for folder in plugins:
        import_user_module(folder)
    # Made by the main process, never read from a file.
    _process_task = pickle.loads(pickled)
    # A pool's workers hold both ends of its pipes, so that none of them sees the end of a main
    # process that is killed.
    watch_parent()


def _run_task(*arguments: object) -> Any:
    return _process_task(*arguments)


def watch_parent() -> None:
    """Let a thread end this process with the one that started it, however that went."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
