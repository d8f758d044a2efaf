"""OpenMP's threads sleep soon while other programs use the cores, and spin while none does."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runs

CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0

# What a process prints under a load that rises and falls by its own will, not by that of the
# machine. Each line that it reads is run in a fork: torch is imported once, and starts no thread of
# OpenMP before.
PROGRAM = """
    import io, json, os, sys, threading, time, traceback
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

    def outcome(code, chosen):
        os.environ.update(chosen)
        sys.stdout = io.StringIO()
        try:
            exec(code, globals())
        except BaseException:
            return None, traceback.format_exc()
        return sys.stdout.getvalue(), ""

    for line in sys.stdin:
        if not os.fork():
            print(json.dumps(outcome(*json.loads(line))), file=sys.__stdout__, flush=True)
            os._exit(0)
        if status := os.wait()[1]:
            print(json.dumps([None, f"ended with status {status}"]), flush=True)
"""
Result = Callable[..., str]


@pytest.fixture(scope="module")
def result_of() -> Iterator[Result]:
    """What a code prints in a process whose environment is plain but for what was chosen."""
    plain = {name: value for name, value in os.environ.items() if name not in CHOICES}
    environment = {**plain, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(runs.ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None

        @functools.cache
        def printed(code: str, **chosen: str) -> str:
            print(json.dumps([textwrap.dedent(code), chosen]), file=process.stdin, flush=True)
            out, error = json.loads(process.stdout.readline())
            assert not error, error
            return out.strip()

        yield printed
        process.stdin.close()


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
def test_threads_wait_briefly_while_the_load_is_high_and_between_the_bounds_as_before(result_of: Result) -> None:
    found = [int(number) for number in result_of(RISE_AND_FALL).split()]
    assert found[1::2] == [0, 1, 1, 0, 0, 1] and found[-1] == 0


def test_one_thread_waits_for_none(result_of: Result) -> None:
    code = """
        torch.set_num_threads(1)
        load["now"] = 1.0
        with waiting.short_waits_under_load():
            time.sleep(0.3)
            print(spare_threads())
    """
    assert result_of(code) == "0"


@pytest.mark.skipif(CORES != 2, reason="counts the spare threads of two cores")
def test_its_threads_end_before_the_interpreter(result_of: Result) -> None:
    code = """
        load["now"] = 1.0
        with waiting.short_waits_under_load():
            until(spare_threads)
        print([thread.name for thread in threading.enumerate()])
    """
    assert result_of(code) == "['MainThread']"


def test_where_threads_cannot_be_started_nothing_happens(result_of: Result) -> None:
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
def test_the_users_choice_is_left(result_of: Result, chosen: dict[str, str]) -> None:
    code = "with waiting.short_waits_under_load(): print([thread.name for thread in threading.enumerate()])"
    assert result_of(code) == "['MainThread', 'load']"
    assert result_of(code, **chosen) == "['MainThread']"


def test_nothing_happens_where_the_system_does_not_tell_how_long_threads_waited(result_of: Result) -> None:
    code = """
        waiting._waited = dict
        with waiting.short_waits_under_load():
            print([thread.name for thread in threading.enumerate()])
    """
    assert result_of(code) == "['MainThread']"


@pytest.mark.skipif(CORES != 2, reason="has as many threads as cores, and one more")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads CPU time of threads from /proc")
def test_a_waiting_thread_gives_up_its_core_and_numbers_stay(result_of: Result) -> None:
    """The CPU time of a thread that waits for the next parallel loop, in ticks of the kernel,
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


def test_the_time_without_a_core_is_read_for_each_thread(result_of: Result) -> None:
    code = """
        import importlib
        waited = importlib.reload(waiting)._waited()
        print(str(os.getpid()) in waited, all(seconds >= 0 for seconds in waited.values()))
    """
    assert result_of(code) == "True True"
