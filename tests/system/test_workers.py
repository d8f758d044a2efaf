"""Worker processes of one task."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import pytest

from fairseq.errors import UserError
from fairseq.system.workers import Workers, in_another_process

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


def _total(numbers: Iterable[int], start: int) -> int:
    return sum(numbers, start)


def _refusal(numbers: Iterable[int]) -> None:
    raise UserError(f"{sum(numbers)} is too many")


def _death(numbers: Iterable[int]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _endless(*_: Any) -> None:
    time.sleep(600)


def test_another_process_reads_what_it_is_given_and_its_errors_are_ours() -> None:
    assert in_another_process(_total, range(5), 100) == 110
    with pytest.raises(UserError, match="10 is too many"):
        in_another_process(_refusal, range(5))
    with pytest.raises(UserError, match="a process died"):
        in_another_process(_death, range(5))


@pytest.mark.parametrize("where", ["another process", "workers"])
def test_an_interrupt_does_not_wait_for_what_processes_compute(where: str) -> None:
    others = set(multiprocessing.active_children())
    begin, before = time.monotonic(), signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            if where == "workers":
                with Workers(_endless, 2) as workers:
                    list(workers.map([()] * 4))
            else:
                in_another_process(_endless, range(5))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert set(multiprocessing.active_children()) <= others
    assert time.monotonic() - begin < 300
