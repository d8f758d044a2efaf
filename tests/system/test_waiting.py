"""OpenMP's threads sleep soon while other programs use the cores, and spin while none does."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import runs

CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

# What a process prints under a load that rises and falls by its own will, not by that of the
# machine.
PROGRAM = """
    import os, sys, threading, time
    import torch
    from fairseq.system import waiting

    load = {"now": 0.0, "total": 1.0}

    def waited():
        load["total"] += load["now"] * waiting._INTERVAL
        return {"1": load["total"]}

    waiting._waited = waited
    waiting._INTERVAL = 0.02

    def spare_threads():
        return sum(thread.name == "spare" for thread in threading.enumerate())

    def until(condition):
        end = time.monotonic() + 60
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        return condition()
"""


@functools.cache
def result_of(code: str, threads: int = 2, **chosen: str) -> str:
    plain = {name: value for name, value in os.environ.items() if name not in CHOICES}
    environment = {**plain, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(runs.ROOT), **chosen}
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


RISE_AND_FALL = """
    found = []
    with waiting.short_waits_under_load():
        for share in (0.05, 0.6, 0.2, 0.05, 0.2, 0.6):
            load["now"] = share
            expected = int(share > 0.3 or (share == 0.2 and bool(spare_threads())))
            found.append(until(lambda: spare_threads() >= expected) and spare_threads())
            time.sleep(0.1)
            found.append(spare_threads())
    until(lambda: not spare_threads())
    print(*found, spare_threads())
"""


@pytest.mark.skipif(CORES != 2, reason="counts the spare threads of two cores")
def test_threads_wait_briefly_while_the_load_is_high_and_between_the_bounds_as_before() -> None:
    found = [int(number) for number in result_of(RISE_AND_FALL).split()]
    assert found[1::2] == [0, 1, 1, 0, 0, 1] and found[-1] == 0


def test_one_thread_waits_for_none() -> None:
    code = """
        load["now"] = 1.0
        with waiting.short_waits_under_load():
            time.sleep(0.3)
            print(spare_threads())
    """
    assert result_of(code, threads=1) == "0"


@pytest.mark.skipif(CORES != 2, reason="counts the spare threads of two cores")
def test_its_threads_end_before_the_interpreter() -> None:
    code = """
        load["now"] = 1.0
        with waiting.short_waits_under_load():
            until(spare_threads)
        print([thread.name for thread in threading.enumerate()])
    """
    assert result_of(code) == "['MainThread']"


def test_where_threads_cannot_be_started_nothing_happens() -> None:
    code = """
        load["now"], left, start = 1.0, [0], threading.Thread.start

        def start_some(thread):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
            start(thread)

        threading.Thread.start = start_some
        for startable in (0, 1, 2):
            left[0] = startable
            with waiting.short_waits_under_load():
                time.sleep(0.3)
            print([thread.name for thread in threading.enumerate()])
    """
    assert result_of(code).splitlines() == ["['MainThread']"] * 3


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": ""}])
def test_the_users_choice_is_left(chosen: dict[str, str]) -> None:
    code = "with waiting.short_waits_under_load(): print([thread.name for thread in threading.enumerate()])"
    assert result_of(code) == "['MainThread', 'load']"
    assert result_of(code, **chosen) == "['MainThread']"


def test_nothing_happens_where_the_system_does_not_tell_how_long_threads_waited() -> None:
    code = """
        waiting._waited = dict
        with waiting.short_waits_under_load():
            print([thread.name for thread in threading.enumerate()])
    """
    assert result_of(code) == "['MainThread']"


@pytest.mark.skipif(CORES != 2, reason="has as many threads as cores, and one more")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads processor time of threads from /proc")
def test_a_waiting_thread_gives_up_its_core_and_numbers_stay() -> None:
    """The processor time of a thread that waits for the next parallel loop, in ticks of the kernel,
    and a sum."""
    code = """
        torch.manual_seed(1)
        x = torch.randn(1 << 20)

        def spent():
            start = time.process_time()
            sums = []
            for _ in range(40):
                sums.append(x.sum().item())
                time.sleep(0.02)
            return time.process_time() - start, sums

        spent()
        long, first = spent()
        with waiting._spare_threads():
            until(spare_threads)
            time.sleep(0.1)
            short, second = spent()
        print(long, short, first == second)
    """
    long, short, same = result_of(code).split()
    assert same == "True"
    if float(long) < 0.04:
        pytest.skip("this OpenMP's threads do not spin while they wait")
    assert float(long) > 2 * float(short)


def test_the_time_without_a_core_is_read_for_each_thread() -> None:
    code = """
        import importlib
        waited = importlib.reload(waiting)._waited()
        print(str(os.getpid()) in waited, all(seconds >= 0 for seconds in waited.values()))
    """
    assert result_of(code) == "True True"
