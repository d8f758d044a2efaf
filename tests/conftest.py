"""Conditions that hold for every test, however and wherever the suite was started."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# Registered before a test keeps what is registered: a module that is imported once does not
# register again.
import fairseq.tasks.sentence_ranking  # noqa: F401
from fairseq.modules import precision
from fairseq.system import plugins

torch.set_num_threads(1)  # the models are tiny: more threads would only wait for one another

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported: no test asks the network

# An example takes as long as it takes: a loaded machine is no failure.
settings.register_profile("any speed", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

# A forked process has none of the threads of this one: to collect what owns a thread, as a store
# does, would be to wait for ever. What a process inherits is not its own to collect.
os.register_at_fork(after_in_child=gc.freeze)


def forget_wakeups() -> None:
    """Let a signal of a fork, which a spawned process would get alone, not wake the process that it
    was forked from."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=forget_wakeups)

# A job in the background of a script ignores SIGINT, and so would every process that a test starts
# and interrupts.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

# The suite may itself be a task of a cluster or run under torchrun: its tests are not.
CLUSTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")
for name in list(os.environ):
    if name in CLUSTER or name.startswith(("SLURM_", "TORCHELASTIC_")):
        del os.environ[name]


@pytest.fixture(autouse=True)
def plugins_of_a_test_are_no_others() -> Iterator[None]:
    """Worker processes import the plug-ins of their main process: those of this test, not of all
    before."""
    before = list(plugins._imported)
    yield
    plugins._imported[:] = before


@pytest.fixture(autouse=True)
def bfloat16_is_computed_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every processor, so that tests see the same numbers."""
    monkeypatch.setattr(precision, "bfloat16_is_slower", lambda: False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--device``."""
    parser.addoption(
        "--device", choices=("cpu", "cuda", "strict"), default="cpu", help="where tests train in their own process"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among what lives until the end: modules and thousands of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Tell the tests their device."""
    import runs

    runs.DEVICE = config.getoption("--device")
    if runs.DEVICE == "strict":
        import strict

        strict.activate()
