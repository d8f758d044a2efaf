"""Worker processes of one task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

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
