"""Heartbeats name the process because of which a job ends: stopped, failed, or hanging where the others wait."""

from __future__ import annotations

import inspect
import sysconfig
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from fairseq.distributed import heartbeat
from fairseq.distributed.heartbeat import Heartbeat, publish_failure
from fairseq.distributed.workers import Failure

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
LATE = RuntimeError("Timed out waiting 5000ms for recv operation to complete")


class EndedError(Exception):
    """The end of a process: its heartbeat found that another one failed."""


def fail(failure: Failure) -> NoReturn:
    raise EndedError(failure.rank, failure.reason)


class Clock:
    """In place of the event that stops a heartbeat: before each tick *tick* is called with its number, to *ticks*."""

    def __init__(self, ticks: int, tick: Callable[[int], Any] = lambda number: None, stopped: bool = False) -> None:
        self.ticks, self.tick, self.stopped = ticks, tick, stopped
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        if len(self.waited) > self.ticks:
            return True
        self.tick(len(self.waited))
        return False

    def is_set(self) -> bool:
        return self.stopped

    def set(self) -> None:
        self.stopped = True


def beats(size: int, rank: int = 0, timeout: float = 10, store: Any = None) -> tuple[Any, Heartbeat]:
    """A store, and the heartbeat of *rank*; the others have made theirs and have not begun."""
    store = store or dist.HashStore()
    made = {other: Heartbeat(store, other, size, timeout, fail) for other in range(size)}
    return store, made[rank]


def run(beat: Heartbeat, clock: Clock) -> list[float]:
    """Run *beat* by *clock*; returns the seconds that it waited for each tick."""
    beat.stopped = clock  # type: ignore[assignment]
    beat._run()
    return clock.waited


# ---- watching --------------------------------------------------------------------------------------------------------


def test_a_process_without_seven_heartbeats_is_stopped_and_all_are_told() -> None:
    store, beat = beats(3)
    clock = Clock(100, lambda number: store.set("heartbeat/1", f"{number} waiting"))
    with pytest.raises(EndedError) as end:
        run(beat, clock)
    reason = "no heartbeat for 7 s: it is stopped, or its machine is unreachable"
    assert end.value.args == (2, reason)
    assert clock.waited == [1.0] * 8, "ten in --distributed-timeout; the first tells what the last value was"
    with pytest.raises(EndedError) as told:
        run(Heartbeat(store, 1, 3, 10, fail), Clock(1))
    assert told.value.args == (2, reason)


def test_a_process_that_misses_six_heartbeats_at_a_time_runs() -> None:
    store, beat = beats(2)
    run(beat, Clock(50, lambda number: number % 7 or store.set("heartbeat/1", f"{number} waiting")))
    assert store.get("failure") == b""


def test_other_ranks_watch_rank_0_alone() -> None:
    store, beat = beats(3, rank=2)
    run(beat, Clock(50, lambda number: store.set("heartbeat/0", f"{number} waiting")))
    with pytest.raises(EndedError, match="0, 'no heartbeat for 7 s"):
        run(beat, Clock(50))


def test_a_heartbeat_that_has_been_stopped_finds_no_failure() -> None:
    store, beat = beats(2)
    run(beat, Clock(20, stopped=True))
    publish_failure(store, Failure(1, 1, "gone"))
    run(beat, Clock(20, stopped=True))


def test_every_heartbeat_counts_on_and_says_where_its_process_is() -> None:
    store, beat = beats(2)
    values: list[bytes] = [store.get("heartbeat/0")]
    run(beat, Clock(3, lambda _: values.append(store.get("heartbeat/0"))))
    values.append(store.get("heartbeat/0"))
    count, places = zip(*(value.decode().split(" ") for value in values[1:]), strict=True)
    assert count == ("0", "1", "2", "3") and places[0] == ""
    assert all(place.startswith("fairseq/distributed/heartbeat.py:") for place in places[1:])


class Gone:
    """A store whose host has ended."""

    def __getattr__(self, name: str) -> Any:
        def request(*_: object) -> NoReturn:
            raise RuntimeError("Connection reset by peer")

        return request


@pytest.mark.parametrize("timeout, seconds", [(10, 1.0), (600, 2.0)])
def test_a_rendezvous_that_is_gone_is_rank_0s_failure_unless_the_job_ends_in_that_moment(
    timeout: float, seconds: float
) -> None:
    _, beat = beats(2, rank=1, timeout=timeout)
    beat.store = Gone()  # type: ignore[assignment]
    clock = Clock(100)
    with pytest.raises(EndedError, match="0, 'the rendezvous does not respond: its process has ended or is stopped'"):
        run(beat, clock)
    assert clock.waited == [timeout / 10, seconds]
    run(beat, Clock(1))
    beat.fail = lambda failure: None
    assert len(run(beat, Clock(100))) == 2, "it does not go on without a store"


def test_requests_end_before_reductions_do() -> None:
    store, _ = beats(1)
    assert store.timeout == timedelta(seconds=7)


def test_the_thread_beats_until_it_is_stopped_and_does_not_hold_up_the_end_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    twice = threading.Semaphore(0)
    other = Heartbeat(store, 1, 2, 600, fail)
    beat = Heartbeat(store, 0, 2, 0.01, fail)
    # Raises where there is no such method: the thread would call another, and this one would wait for it.
    monkeypatch.setattr(beat, "_position", lambda: twice.release() or "here")
    beat.fail = lambda failure: None
    beat.start()
    assert twice.acquire(timeout=60) and twice.acquire(timeout=60)
    beat.stop()
    beat.thread.join(60)  # stop waits 0.01 s, which a busy machine may need to run the thread at all
    assert not beat.thread.is_alive() and beat.thread.daemon and other.thread.daemon
    assert store.get("heartbeat/0").endswith(b" here")


def test_a_thread_that_does_not_end_is_not_waited_for_longer_than_the_timeout() -> None:
    _, beat = beats(1, timeout=0.1)
    beat.thread = threading.Thread(target=threading.Event().wait, daemon=True)
    beat.start()
    beat.stop()
    assert beat.stopped.is_set() and beat.thread.is_alive()


# ---- publishing ------------------------------------------------------------------------------------------------------


def test_the_first_failure_counts_and_is_told_by_its_last_line() -> None:
    store, beat = beats(3)
    beat.report(Failure(0, 1, "Traceback:\n  in train\nValueError: odd \n"))
    assert beat.stopped.is_set()
    for rank in (1, 2):
        Heartbeat(store, rank, 3, 10, fail).report(Failure(rank, 1, "Connection closed"))
        assert Heartbeat(store, rank, 3, 10, fail).explain(LOST) == Failure(0, 1, "ValueError: odd")
    with pytest.raises(EndedError, match="0, 'ValueError: odd'"):
        run(Heartbeat(store, 1, 3, 10, fail), Clock(1))


def test_a_failure_may_have_no_reason() -> None:
    store, beat = beats(3)
    publish_failure(store, Failure(1, 1, ""))
    assert beat.explain(LOST) == Failure(1, 1, "")


def test_a_users_mistake_is_told_whole_with_its_exit_code() -> None:
    store, beat = beats(3)
    publish_failure(store, Failure(1, 2, "a b.txt: not\n found"))
    assert beat.explain(LOST) == Failure(1, 2, "a b.txt: not found")


def test_a_failure_of_the_stores_host_cannot_be_told() -> None:
    _, beat = beats(2, rank=1)
    beat.store = Gone()  # type: ignore[assignment]
    beat.report(Failure(1, 1, "lost"))
    assert beat.stopped.is_set()
    assert beat.explain(LOST) is None


def test_who_finds_a_stopped_process_second_reports_the_first_failure() -> None:
    store, beat = beats(3)

    def tick(number: int) -> None:
        if number == 8:
            seen = beat._published

            def late() -> Any:  # another's failure is published after this tick has looked
                found = seen()
                publish_failure(store, Failure(1, 1, "full disk"))
                beat._published = seen  # type: ignore[method-assign]
                return found

            beat._published = late  # type: ignore[method-assign]

    with pytest.raises(EndedError, match="1, 'full disk'"):
        run(beat, Clock(100, tick))


# ---- explaining ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, is_lost",
    [
        (LOST, True),
        (LATE, True),
        (RuntimeError("wait timeout after 5000ms"), True),
        (RuntimeError("Connection reset by 10.0.0.1"), True),
        (RuntimeError("Connection closed"), True),
        (RuntimeError("Gloo connectFullMesh failed"), True),
        (RuntimeError("NCCL error: unhandled system error"), True),
        (dist.DistNetworkError("timed out"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo: connection closed, timed out"), False),
    ],
)
def test_an_error_of_communication_has_its_cause_elsewhere(error: Exception, is_lost: bool) -> None:
    store, beat = beats(3)
    publish_failure(store, Failure(2, 1, "the disk is on fire"))
    assert beat.explain(error) == (Failure(2, 1, "the disk is on fire") if is_lost else None)
    assert beat.stopped.is_set() == is_lost


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each sleep, which take no time."""
    seconds: list[float] = []
    monkeypatch.setattr(heartbeat.time, "sleep", seconds.append)
    return seconds


def test_a_cause_is_waited_for_two_seconds(slept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    store, beat = beats(2)
    assert beat.explain(LOST) is None
    assert sum(slept) == pytest.approx(2)
    slept.clear()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 5:
            publish_failure(store, Failure(1, 1, "odd"))

    monkeypatch.setattr(heartbeat.time, "sleep", sleep)
    assert beat.explain(LOST) == Failure(1, 1, "odd") and len(slept) == 5


def places(store: Any, *of_ranks: str) -> None:
    for rank, place in enumerate(of_ranks):
        store.set(f"heartbeat/{rank}", f"7 {place}")


@pytest.mark.parametrize(
    "of_ranks, culprit",
    [
        (("waiting", "waiting", "train.py:12"), (2, "train.py:12")),
        (("waiting", "a b.py:1", "train.py:12"), (1, "a b.py:1")),
        (("train.py:3", "waiting", "train.py:12"), (2, "train.py:12")),  # rank 0 itself handles the error there
        (("train.py:3", "waiting", "waiting"), None),
        (("waiting", "", ""), None),
    ],
)
def test_a_reduction_that_times_out_names_the_first_process_that_does_not_wait(
    slept: list[float], of_ranks: tuple[str, ...], culprit: tuple[int, str] | None
) -> None:
    store, beat = beats(3, timeout=5)
    places(store, *of_ranks)
    found = beat.explain(LATE)
    assert slept == [0.1], "its cause would have been published for long"
    if culprit is None:
        assert found is None and store.get("failure") == b""
    else:
        rank, place = culprit
        reason = f"hangs at {place}: the others waited 5 s for it (`distributed_timeout`)"
        assert found == Failure(rank, 1, reason)
        assert store.get("failure").decode() == f"{rank} 1 {reason}"


def test_a_timeout_may_be_called_so(slept: list[float]) -> None:
    store, beat = beats(2, timeout=5)
    places(store, "waiting", "train.py:12")
    assert beat.explain(RuntimeError("wait Timeout after 5000ms")) is not None


def test_a_process_that_is_elsewhere_is_not_the_cause_of_a_lost_connection(slept: list[float]) -> None:
    store, beat = beats(2)
    places(store, "waiting", "train.py:12")
    assert beat.explain(LOST) is None


# ---- place -----------------------------------------------------------------------------------------------------------


def place_of(file: str) -> tuple[str, int]:
    """The place of a process whose main thread waits in code of *file*, and the line of this file that called it."""
    _, beat = beats(1)
    found: list[str] = []
    looking = threading.Thread(target=lambda: found.append(beat._position()))
    code = compile("def wait(thread):\n    thread.start()\n    thread.join()\n", file, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    names["wait"](looking)
    return found[0], line


@pytest.mark.parametrize(
    "file", [str(Path(torch.__file__).parent / "nn" / "x.py"), str(Path(sysconfig.get_paths()["stdlib"]) / "x.py")]
)
def test_the_place_of_a_process_is_outside_libraries(file: str) -> None:
    place, line = place_of(file)
    assert place == f"tests/distributed/test_heartbeat.py:{line}"


def test_the_place_of_a_script_is_its_file_and_line() -> None:
    place, _ = place_of("/elsewhere/script.py")
    assert place in ("/elsewhere/script.py:2", "/elsewhere/script.py:3")  # still starts the thread, or waits for it


def test_a_process_within_torchs_collectives_waits() -> None:
    file = Path(torch.__file__).parent / "distributed" / "x.py"
    assert place_of(str(file))[0] == "waiting"


def test_a_process_whose_own_code_has_ended_waits() -> None:
    _, beat = beats(1)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    beat.main = thread.ident
    assert beat._position() == "waiting"
    end.set()
    thread.join()
    beat.main = None
    assert beat._position() == "waiting"
