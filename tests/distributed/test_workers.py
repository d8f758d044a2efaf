"""Workers of one machine are started with their ranks, are passed signals, and end together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq.distributed import workers
from fairseq.distributed.interruption import SIGNALS
from fairseq.distributed.workers import Failure, Workers

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers fork, which takes less time than to spawn them, as GPUs need it."""
    monkeypatch.setattr(torch.multiprocessing, "get_context", {"spawn": FORK}.__getitem__)


def blocked() -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


def report(messages: Any, rank: int, local_rank: int, *args: Any) -> None:
    messages.put((rank, local_rank, args, blocked() & set(SIGNALS)))


def forever(messages: Any, rank: int, local_rank: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    messages.put(rank)
    threading.Event().wait()


def tell(messages: Any, rank: int, local_rank: int) -> None:
    """Report the first signal, which has to be one that the launcher passes on."""
    messages.put(signal.sigwait(SIGNALS))


# ---- starting and ending ---------------------------------------------------------------------------------------------


def test_each_worker_has_its_rank_its_place_and_the_arguments() -> None:
    with Workers(report, 4, 2, ("a", 1)) as started:
        assert started.wait() is None
        found = [started.messages.get() for _ in range(2)]
    assert sorted(found) == [(4, 0, ("a", 1), set(SIGNALS)), (5, 1, ("a", 1), set(SIGNALS))]
    assert not blocked() & set(SIGNALS), "signals wait until workers handle them, and reach this process"


def test_the_end_of_the_statement_kills_workers_even_those_that_are_stopped() -> None:
    with Workers(forever, 0, 2, ()) as started:
        ready = {started.messages.get(), started.messages.get()}
        os.kill(started.processes[1].pid, signal.SIGSTOP)
        assert ready == {0, 1} and started.signal == 0
    assert [process.exitcode for process in started.processes] == [-signal.SIGKILL] * 2


def test_handlers_are_restored_and_signals_that_are_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        others = [signal.getsignal(number) for number in SIGNALS]
        with Workers(report, 0, 1, ()) as started:
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
            assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN, started._pass_on}
        assert [signal.getsignal(number) for number in SIGNALS] == others
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_workers_of_another_thread_leave_handlers_alone() -> None:
    failed: list[Failure | None] = []

    def start() -> None:
        with Workers(report, 0, 1, ()) as started:
            failed.append(started.wait())

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert failed == [None]


def test_a_worker_that_cannot_start_ends_those_before_it() -> None:
    def refuse() -> None:
        raise OSError("no more processes")

    before = [signal.getsignal(number) for number in SIGNALS]
    started = Workers(forever, 0, 3, ())
    started.processes[1].start = refuse
    with pytest.raises(OSError, match="no more processes"), started:
        pass
    assert started.processes[0].exitcode == -signal.SIGKILL and started.processes[2].pid is None
    assert [signal.getsignal(number) for number in SIGNALS] == before and not blocked() & set(SIGNALS)


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_passed_on_and_the_workers_decide(number: signal.Signals) -> None:
    with Workers(tell, 0, 2, ()) as started:
        os.kill(os.getpid(), number)
        assert started.wait() is None and started.signal == number
        assert [started.messages.get() for _ in range(2)] == [number] * 2


def test_a_signal_is_for_workers_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[int] = []

    def kill(pid: int, number: int) -> None:
        signalled.append(pid)
        if pid == 2:
            raise ProcessLookupError

    started = Workers(tell, 0, 0, ())
    started.processes = [SimpleNamespace(pid=pid, is_alive=lambda pid=pid: pid != 1) for pid in (1, 2, 3)]
    monkeypatch.setattr(workers.os, "kill", kill)
    started._pass_on(signal.SIGTERM, None)
    assert signalled == [2, 3], "2 has ended in this moment"


def test_a_second_signal_kills_the_workers() -> None:
    with pytest.raises(SystemExit) as end, Workers(forever, 0, 2, ()) as started:
        assert {started.messages.get(), started.messages.get()} == {0, 1}
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        started.wait()
    assert end.value.code == 128 + signal.SIGTERM and started.signal == signal.SIGINT
    assert [process.exitcode for process in started.processes] == [-signal.SIGKILL] * 2


# ---- failures --------------------------------------------------------------------------------------------------------


def ending(monkeypatch: pytest.MonkeyPatch, *codes: list[int | None], messages: tuple[Any, ...] = ()) -> Any:
    """What is reported of processes that have each of *codes* in turn, and the number of waits."""
    turns, slept = list(codes), list[float]()
    started = Workers(report, 4, len(codes[0]), ())
    for message in messages:
        started.messages.put(message)

    def sleep(seconds: float) -> None:
        assert 0 < seconds <= 0.1, "ends are noticed soon"
        slept.append(seconds)
        turns.pop(0)

    def exit_code(place: int) -> int | None:
        return turns[0][place]

    class Process:
        def __init__(self, place: int) -> None:
            self.place = place

        exitcode = property(lambda self: exit_code(self.place))

    started.processes = [Process(place) for place in range(len(codes[0]))]
    monkeypatch.setattr(workers.time, "sleep", sleep)
    return started.wait(), len(slept)


@pytest.mark.parametrize(
    "codes, failure, waits",
    [
        ([[None, None], [0, None], [0, 0]], None, 2),
        ([[None, None], [None, 130], [143, 130]], Failure(4, 143, ""), 2),
        ([[0, 138]], Failure(5, 138, ""), 0),
        ([[None, -9]], Failure(5, 1, "killed by signal 9 (SIGKILL)"), 0),
        ([[1, None, -11]], Failure(6, 1, "killed by signal 11 (SIGSEGV)"), 0),
        ([[2, 0, 143, -40]], Failure(7, 1, "killed by signal 40"), 0),
        ([[None, 7, 8]], Failure(5, 1, "exited with code 7"), 0),
        ([[None, 143, 1]], Failure(6, 1, "exited without an error message"), 0),
    ],
)
def test_the_end_of_the_workers_is_that_of_the_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, codes: Any, failure: Failure | None, waits: int
) -> None:
    assert ending(monkeypatch, *codes) == (failure, waits)


def test_the_first_message_counts_unless_a_worker_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Failure(5, 2, "--flag: of no use"), Failure(4, 1, "Connection closed")]
    assert ending(monkeypatch, [1, 2], messages=(*told,)) == (Failure(5, 2, "--flag: of no use"), 0)
    killed = Failure(5, 1, "killed by signal 9 (SIGKILL)")
    assert ending(monkeypatch, [1, -9], messages=(*told,)) == (killed, 0)


def leaving(messages: Any, rank: int, local_rank: int, code: int, reason: str) -> None:
    try:
        workers.leave(messages, Failure(rank, code, reason))
    finally:
        messages.put("it should have ended")


def test_a_worker_that_leaves_says_why_in_as_much_as_a_pipe_holds() -> None:
    with Workers(leaving, 3, 1, (2, "a" * 30_000 + "ValueError")) as started:
        failure = started.wait()
        assert started.messages.empty()
    assert failure == Failure(3, 2, "a" * 19_990 + "ValueError")


# ---- the launcher's end ----------------------------------------------------------------------------------------------


def orphan(action: Callable[[], None]) -> bytes:
    """What a worker has written when it has ended: its launcher is killed after it has written a byte."""
    read, write = os.pipe()

    def work() -> None:
        os.close(read)
        workers.end_with_launcher()
        os.write(write, b".")
        action()
        os.write(write, b"!")

    def launch() -> None:
        child = FORK.Process(target=work)
        child.start()
        os.close(write)
        child.join()

    launcher = FORK.Process(target=launch)
    launcher.start()
    os.close(write)
    found = os.read(read, 1)
    launcher.kill()
    launcher.join()
    while part := os.read(read, 1):  # until nobody can write
        found += part
    os.close(read)
    return found


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux signals the end of a parent")
def test_a_stopped_worker_ends_with_its_launcher() -> None:
    assert orphan(stop) == b"."


@pytest.mark.parametrize("platform", ["darwin", sys.platform, "no library"])
def test_a_worker_that_waits_ends_with_its_launcher(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    def library(name: str | None) -> SimpleNamespace:
        if platform == "no library":
            raise OSError("not found")
        return SimpleNamespace()  # without prctl

    monkeypatch.setattr(workers.sys, "platform", "linux" if platform == "no library" else platform)
    monkeypatch.setattr(workers.ctypes, "CDLL", library)
    assert orphan(lambda: time.sleep(1e6)) == b"."


def work_a_little(messages: Any, rank: int, local_rank: int) -> None:
    workers.end_with_launcher()


def test_a_worker_ends_before_its_launcher() -> None:
    with Workers(work_a_little, 0, 1, ()) as started:
        assert started.wait() is None
