"""A signal that asks a run to stop is recorded; a second one ends the process, unless something
else counts them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from fairseq.distributed import Interruption, World, end_at_signals, launch
from fairseq.distributed.interruption import SIGNALS


def raise_signals(*numbers: int) -> int:
    """The signal that is recorded of *numbers*, sent to this process one after the other."""
    with Interruption() as interruption:
        for number in numbers:
            os.kill(os.getpid(), number)
    return interruption.signal


def code_of(function: Callable[..., int], *args: Any) -> int:
    """The exit code of a process that ends with what *function* returns."""
    child = os.fork()
    if child == 0:
        os._exit(function(*args))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_recorded_until_the_end_of_the_with_statement(number: signal.Signals) -> None:
    before = [signal.getsignal(other) for other in SIGNALS]
    with Interruption() as interruption:
        assert interruption.signal == 0
        os.kill(os.getpid(), number)
        assert interruption.signal == number
    assert [signal.getsignal(other) for other in SIGNALS] == before


def test_a_second_signal_ends_the_process_with_its_code() -> None:
    assert code_of(raise_signals, signal.SIGINT) == signal.SIGINT
    assert code_of(raise_signals, signal.SIGINT, signal.SIGTERM) == 128 + signal.SIGTERM


def _answer(send: Connection) -> None:
    send.send(raise_signals(signal.SIGUSR1, signal.SIGTERM))


def test_a_second_signal_of_a_supervised_process_is_its_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    worker = context.Process(target=_answer, args=(send,))
    worker.start()
    worker.join()
    assert receive.poll(0) and receive.recv() == signal.SIGUSR1
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert code_of(raise_signals, signal.SIGINT, signal.SIGTERM) == signal.SIGINT


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert raise_signals(signal.SIGINT) == 0
        assert raise_signals(signal.SIGINT, signal.SIGTERM) == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def _evaluate(number: int) -> None:
    launch._evaluate(lambda world: os.kill(os.getpid(), number), World(0, 2, torch.device("cpu")))


@pytest.mark.parametrize("number", SIGNALS)
def test_a_worker_that_evaluates_ends_at_the_first_signal(number: signal.Signals) -> None:
    worker = multiprocessing.get_context("fork").Process(target=_evaluate, args=(number,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 128 + number


def test_a_process_without_a_launcher_keeps_its_handlers() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    end_at_signals()
    assert [signal.getsignal(number) for number in SIGNALS] == before


SAID = "SIGINT: the run saves and stops after this update or validation"


@pytest.mark.parametrize(
    "variables, said",
    [
        ({}, f"{SAID}; a second signal ends it at once, and loses what"),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, f"{SAID}\n"),
        ({"RANK": "1"}, ""),
    ],
)
def test_the_first_signal_is_answered_at_once_by_rank_0(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert raise_signals(signal.SIGINT) == signal.SIGINT
    error = capfd.readouterr().err
    assert error.startswith(f"\n{said}" if said else "") and error.count("\n") == (2 if said else 0)


def test_a_run_that_saves_nothing_does_not_promise_to(capfd: pytest.CaptureFixture[str]) -> None:
    with Interruption(saves=False):
        signal.raise_signal(signal.SIGINT)
    said = capfd.readouterr().err
    assert "SIGINT: the run stops, without a checkpoint to go on from, after" in said and "save" not in said
