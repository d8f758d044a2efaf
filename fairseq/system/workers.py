"""One task over many pieces of work, in this process
or in several, with results in the order of the work."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
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
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers[R]:
        if self.count > 1:
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self.count,
                # A fork of a process with threads, such as torch's, may hang.
                multiprocessing.get_context("spawn"),
                initializer=_set_task,
                # The task is pickled here and read by the worker
                # only after its plug-ins are imported.
                initargs=(imported_folders(), pickle.dumps(self._task)),
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        if kind is not None:
            # Nobody waits for what they compute or import:
            # after an interrupt that would take seconds.
            for process in list((self._pool._processes or {}).values()):
                process.kill()
        # Work that waits in the queue would be done before the pool ends.
        self._pool.shutdown(cancel_futures=True)

    def map(self, work: Iterable[tuple[object, ...]]) -> Iterator[R]:
        """Yield ``task(*arguments)`` for each of *work*,
        in order; raise UserError if a process died."""
        if self._pool is None:
            for arguments in work:
                yield self._task(*arguments)
            return
        # Bound the pieces in flight: they, and finished results, wait in memory until their turn.
        waiting: collections.deque[concurrent.futures.Future[R]] = collections.deque()
        try:
            for arguments in work:
                with _interrupts_blocked():  # the first one starts the processes
                    waiting.append(self._pool.submit(_run_task, *arguments))
                if len(waiting) >= 2 * self.count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(f"`workers` {self.count}: a process died, possibly out of memory; use fewer") from None


def in_another_process(task: Callable[..., R], items: Iterable[object], *arguments: object) -> R:
    """Return ``task(items, *arguments)``, computed
    in a process that any exception here ends at once.

    For libraries that do not look for signals while they compute. Everything is picklable.

    Raises:
        UserError: *task* failed, or the process died.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, task, arguments))
    with _interrupts_blocked():
        process.start()
    there.close()
    try:
        for item in items:
            here.send((item,))
        here.send(())
        result, error = here.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise UserError("a process died, possibly out of memory; give a smaller text") from None
    finally:
        process.kill()
        process.join()
        here.close()
    if error is not None:
        raise error
    return result


def _answer(connection: multiprocessing.connection.Connection, task: Callable[..., Any], arguments: Any) -> None:
    watch_parent()
    items = (item for (item,) in iter(connection.recv, ()))
    try:
        connection.send((task(items, *arguments), None))
    except UserError as error:
        connection.send((None, error))


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Hold SIGINT back until the end; processes that start
    meanwhile never get it, from their imports on."""
    # Its own start would unblock the signal.
    multiprocessing.resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_process_task: Callable[..., object]


def _set_task(plugins: list[str], pickled: bytes) -> None:
    """Initialise a worker process; interrupts, which it does not get, are left to the main process,
    which ends it."""
    global _process_task
    # Before the task is read, which may name classes of the plug-ins.
    for folder in plugins:
        import_user_module(folder)
    # Made by the main process, never read from a file.
    _process_task = pickle.loads(pickled)
    # A pool's workers hold both ends of its pipes, so that none of them sees the end of a main
    # process that is killed.
    watch_parent()


def watch_parent() -> None:
    """Let a thread end this process with the one that started it;
    where none can be started, it goes without."""
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=end_with_parent, name="parent", daemon=True).start()


def end_with_parent() -> None:
    """End this process when the one that started it has ended, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _run_task(*arguments: object) -> Any:
    return _process_task(*arguments)
