"""How long OpenMP's threads wait for one another without giving up their cores.

libgomp's waiting threads spin for milliseconds, which is fastest on idle cores.
Beside another program they take the cores from the threads
that they wait for: training falls to a third of its speed.
No setting made at the start serves both: ``OMP_WAIT_POLICY=passive`` and 1,000 spins cost
4 to 6 % on idle cores, and 10,000 spins two thirds of the speed beside another program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_CHOICES = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # a user's
_INTERVAL = 0.25  # seconds between two looks at the load
# Shares of the time in which threads are ready to run
# and have no core: between them nothing changes.
_LOADED, _IDLE = 0.3, 0.1


@contextlib.contextmanager
def short_waits_under_load() -> Iterator[None]:
    """Let threads of OpenMP sleep soon while other programs use the cores of this process, unless
    the user chose.

    Results do not depend on it. Where the operating system does not tell how long threads waited,
    or lets this process start no thread, nothing happens.
    """
    end = threading.Event()
    with contextlib.ExitStack() as watched:
        if not _CHOICES & os.environ.keys() and _waited():
            watched.enter_context(_threads("load", 1, lambda: _watch(end)))
        watched.callback(end.set)
        yield


@contextlib.contextmanager
def _threads(name: str, count: int, work: Callable[[], None]) -> Iterator[bool]:
    """Run *work* in *count* threads, which end with the context;
    False if not all of them can be started."""
    # Not daemons: one that is in an operator of torch
    # when the interpreter ends ends the process with SIGABRT.
    threads = [threading.Thread(target=work, name=name) for _ in range(count)]
    started: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):
            for thread in threads:
                thread.start()
                started.append(thread)
        yield len(started) == count
    finally:
        for thread in started:
            thread.join()


def _watch(end: threading.Event) -> None:
    before = _waited()
    with contextlib.ExitStack() as spare:
        holds = False
        while not end.wait(_INTERVAL):
            now = _waited()
            share = sum(now[thread] - before.get(thread, now[thread]) for thread in now) / _INTERVAL
            before = now
            if not holds and share > _LOADED and "torch" in sys.modules:
                holds = True
                spare.enter_context(_spare_threads())
            elif holds and share < _IDLE:
                holds = False
                spare.close()


@contextlib.contextmanager
def _spare_threads() -> Iterator[None]:
    """Have more threads of OpenMP than there are cores, asleep until the context ends.

    libgomp's threads then spin a hundred times instead of 300,000. It offers no other way to change
    that in a process.
    """
    import torch  # waits for the end of an import that another thread has begun

    release, threads = threading.Event(), torch.get_num_threads()

    def hold() -> None:
        # libgomp ends the process where it cannot start a thread.
        with _threads("room", threads - 1, lambda: None) as has_room:
            pass
        if has_room:
            # A parallel loop makes threads of its own for this one, which end with it.
            torch.ones(1 << 20).add_(1)
        release.wait()

    cores = len(os.sched_getaffinity(0))
    with _threads("spare", (cores - threads) // (threads - 1) + 1 if threads > 1 else 0, hold):
        try:
            yield
        finally:
            release.set()


def _waited() -> dict[str, float]:
    """Seconds that each thread of this process was ready to run and had no core; empty where that
    is not known."""
    seconds = {}
    # A thread may end meanwhile, or there is no such file.
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            seconds[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return seconds
