"""Worker processes of one task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from fairseq.system.workers import Workers

PARENT = """
import os, time
from fairseq.system.workers import Workers

with Workers(os.getpid, 2) as workers:
    print(*set(workers.map([()] * 64)), flush=True)
    time.sleep(600)
"""


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _mask() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def test_workers_never_get_the_interrupt_that_the_main_process_gets() -> None:
    with Workers(_mask, 2) as workers:
        masks = list(workers.map([()] * 4))
    assert masks == [{signal.SIGINT}] * 4, "inherited: nothing a worker imports could set it before an interrupt"
    assert _mask() == set()


def test_workers_end_with_a_main_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(number) for number in parent.stdout.readline().split()]
        assert workers and all(map(_alive, workers))
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [worker for worker in workers if _alive(worker)]
    for worker in left:
        os.kill(worker, signal.SIGKILL)
    assert not left
