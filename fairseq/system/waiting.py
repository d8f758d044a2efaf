"""How long OpenMP's threads wait for one another without giving up their cores.

libgomp's waiting threads spin for milliseconds, which is fastest on idle cores. Beside another program they take the
cores from the threads that they wait for: training falls to a third of its speed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_CHOICES = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}  # a user's
_INTERVAL = 0.25  # seconds between two looks at the load
# Shares of the time in which threads are ready to run and have no core: between them nothing changes.
_LOADED, _IDLE = 0.3, 0.1


@contextlib.contextmanager
def short_waits_under_load() -> Iterator[None]:
    """Let threads of OpenMP sleep soon while other programs use the cores of this process, unless the user chose.

    Results do not depend on it. Where the operating system does not tell how long threads waited, nothing happens.
    """
    end = threading.Event()
    if not _CHOICES & os.environ.keys() and _waited():
        threading.Thread(target=_watch, args=(end,), name="load", daemon=True).start()
    try:
        yield
    finally:
        end.set()


def _watch(end: threading.Event) -> None:
    spare: threading.Event | None = None
    before = _waited()
    while not end.wait(_INTERVAL):
        now = _waited()
        share = sum(now[thread] - before.get(thread, now[thread]) for thread in now) / _INTERVAL
        before = now
        if spare is None and share > _LOADED and "torch" in sys.modules:
            spare = _spare_threads()
        elif spare is not None and share < _IDLE:
            spare.set()
            spare = None
    if spare is not None:
        spare.set()


def _spare_threads() -> threading.Event:
    """Have more threads of OpenMP than there are cores, asleep until the result is set.

    libgomp's threads then spin a hundred times instead of 300,000. It offers no other way to change that in a process.
    """
    import torch  # waits for the end of an import that another thread has begun

    release = threading.Event()

    def hold() -> None:
        # A parallel loop makes threads of its own for this one, which end with it.
        torch.ones(1 << 20).add_(1)
        release.wait()

    threads = torch.get_num_threads()
    if threads > 1:
        cores = len(os.sched_getaffinity(0))
        for _ in range((cores - threads) // (threads - 1) + 1):
            threading.Thread(target=hold, name="spare", daemon=True).start()
    return release


def _waited() -> dict[str, float]:
    """Seconds that each thread of this process was ready to run and had no core; empty where that is not known."""
    seconds = {}
    # A thread may end meanwhile, or there is no such file.
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            seconds[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return seconds
