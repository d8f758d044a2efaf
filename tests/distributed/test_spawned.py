"""Torch's agent starts the ranks of a machine, which end together; the command ends with the
message of the first."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import described, in_processes, job
from mistakes import user_error

from fairseq.config.settings import CommonConfig
from fairseq.distributed import World, end_at_signals, launch, run
from fairseq.distributed.interruption import SIGNALS
from fairseq.errors import UserError

pytestmark = pytest.mark.usefixtures("forked")
FAILED = "process 1 of 2 failed:\n"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


# ---- ranks -------------------------------------------------------------------------------------


def write(folder: Path, world: World) -> None:
    """What this rank knows, in a file of its name."""
    _, _, total, facts = described(None, world)
    (folder / str(world.rank)).write_text(f"{world} {total} {facts} {os.environ.get('OMP_NUM_THREADS')}")


def written(folder: Path, size: int, threads: Any, device: str = "cpu") -> None:
    """Assert that each rank of a job of *size* has written what it ought to know."""
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    facts = ("gloo", timedelta(seconds=60), name)
    total = sum(range(size))
    for number in range(size):
        world = World(number, size, torch.device(device if device == "cpu" else f"{device}:{number}"), 60.0)
        assert (folder / str(number)).read_text() == f"{world} {total} {facts} {threads}"


@pytest.mark.parametrize("cores, threads", [(7, 3), (1, 1), (None, 1)])
def test_ranks_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path, cores: int | None, threads: int
) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    before, threads_before = [signal.getsignal(number) for number in SIGNALS], threading.active_count()
    monkeypatch.setattr(launch, "check_processes", lambda flag, count: None)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert run(job(write, tmp_path, distributed_world_size=2)) is None
    written(tmp_path, 2, threads)
    assert not list(temporary.iterdir()), "nothing is left of the agent's files"
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert threading.active_count() == threads_before


@pytest.mark.usefixtures("gpus")
def test_each_rank_has_the_gpu_of_its_number(tmp_path: Path) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    run(job(write, tmp_path, CommonConfig(), distributed_backend="gloo"))
    written(tmp_path, 2, None, "cuda")


class Plugged:
    """A value that can be unpickled where its plug-in has been imported."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("plug_in_of_a_job",)


def call(value: Any, world: World) -> None:
    value.called(world)


def test_ranks_import_plug_ins_before_the_value(tmp_path: Path) -> None:
    folder = tmp_path / "plug_in_of_a_job"
    folder.mkdir()
    code = f"from pathlib import Path\n\ndef called(world):\n    Path({str(tmp_path)!r}, str(world.rank)).touch()\n"
    (folder / "__init__.py").write_text(code)
    run(job(call, Plugged(), CommonConfig(cpu=True, user_dir=str(folder)), distributed_world_size=2))
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
    with pytest.raises(SystemExit, match="1"):
        run(job(call, Plugged(), distributed_world_size=2))


# ---- failures ----------------------------------------------------------------------------------


def fail(action: str, world: World) -> None:
    end_at_signals()
    world.barrier()
    if world.rank == 1:
        if action == "mistake":
            raise UserError("`flag`: of no use")
        if action == "memory":
            raise MemoryError("out of memory")
        if action == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "aborted":
            os.abort()
        if action == "gone":
            os._exit(7)
        if action == "error":
            raise ValueError("the disk\033[2J is on fire")
    if action == "signal":
        sys.exit(143)
    if action == "busy":
        time.sleep(1e6)
    world.barrier()


@pytest.mark.parametrize(
    "action, message", [("mistake", "^--flag: of no use$"), ("memory", "^out of host memory: raise --batch-chunk")]
)
def test_a_users_mistake_in_a_rank_is_the_commands(
    capfd: pytest.CaptureFixture[str], action: str, message: str
) -> None:
    with user_error(message):
        run(job(fail, action, distributed_world_size=2))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "action, code, start, end",
    [
        ("killed", 1, f"{FAILED}killed by signal 9 (SIGKILL)\n", ""),
        ("gone", 1, f"{FAILED}exited with code 7\n", ""),
        ("error", 1, f"{FAILED}Traceback (most", "ValueError: the disk\\x1b[2J is on fire"),
        ("signal", 143, "", ""),
    ],
)
def test_a_rank_that_fails_or_stops_ends_the_command(
    capfd: pytest.CaptureFixture[str], action: str, code: int, start: str, end: str
) -> None:
    with pytest.raises(SystemExit) as exit:
        run(job(fail, action, distributed_world_size=2))
    assert exit.value.code == code
    error = capfd.readouterr().err
    assert error.startswith(start) and error.rstrip().endswith(end) and bool(error) == bool(start)


@pytest.mark.parametrize(
    "error, where", [(MemoryError(), "host"), (torch.OutOfMemoryError("CUDA out of memory. Tried"), "GPU")]
)
def test_memory_that_is_exhausted_is_the_hosts_or_the_gpus(error: Exception, where: str) -> None:
    assert str(launch._mistake(error)).startswith(f"out of {where} memory: raise --batch-chunk")


# ---- restarts ----------------------------------------------------------------------------------


def fail_once(folder: Path, world: World) -> None:
    end_at_signals()
    world.barrier()
    number = len(list(folder.glob("start*")))
    world.barrier()
    if world.is_first:
        (folder / f"start{number}").touch()
    if number == 0 and world.rank == world.size - 1:
        raise ValueError("the disk is on fire")
    world.barrier()


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_start_again_after_a_failure_and_it_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], size: int
) -> None:
    folder = tmp_path / "starts"
    folder.mkdir()
    run(job(fail_once, folder, distributed_world_size=size, max_restarts=1))
    assert len(list(folder.iterdir())) == 2
    assert "ValueError: the disk is on fire\n" in capfd.readouterr().err


def test_restarts_end(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        run(job(fail, "killed", distributed_world_size=2, max_restarts=1))
    error = capfd.readouterr().err
    assert error.startswith("failed (exitcode: -9) local_rank: 1") and "terminated with signal SIGKILL" in error
    assert error.endswith(f"{FAILED}killed by signal 9 (SIGKILL)\n")


# ---- signals -----------------------------------------------------------------------------------


def wait_for_a_signal(folder: Path, world: World) -> None:
    world.barrier()
    (folder / f"ready{world.rank}").touch()
    number = signal.sigwait(SIGNALS)
    (folder / f"{world.rank}").write_text(str(int(number)))


def ignore_signals(folder: Path, world: World) -> None:
    world.barrier()
    (folder / f"ready{world.rank}").touch()
    if world.is_first:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1e6)


def signal_when_ready(folder: Path, *numbers: int) -> None:
    """Send this process signals once both ranks run."""
    while len(list(folder.glob("ready*"))) < 2:
        time.sleep(0.01)
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_signal_is_passed_on_and_the_ranks_decide(tmp_path: Path, number: signal.Signals) -> None:
    thread = threading.Thread(target=signal_when_ready, args=(tmp_path, number))

    def command() -> None:
        thread.start()
        run(job(wait_for_a_signal, tmp_path, distributed_world_size=2))

    assert in_processes(command)[0][0] == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == [str(int(number))] * 2


def test_a_second_signal_kills_the_ranks_and_ends_the_command(tmp_path: Path) -> None:
    def command() -> None:
        threading.Thread(target=signal_when_ready, args=(tmp_path, signal.SIGINT), daemon=True).start()
        run(job(ignore_signals, tmp_path, distributed_world_size=2))

    assert in_processes(command, fail=True)[0][0] in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_a_signal_before_there_are_ranks_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        with launch._signals_passed_on():
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                time.sleep(0.01)

    assert in_processes(command, fail=True)[0][0] == 128 + signal.SIGTERM


def kill_the_command(folder: Path, world: World) -> None:
    world.barrier()
    if world.is_first:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1e6)


def test_ranks_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    read, write = os.pipe()

    def command() -> None:
        os.close(read)
        run(job(kill_the_command, tmp_path, distributed_world_size=2))

    code = in_processes(command, fail=True)[0][0]
    os.close(write)
    assert code == -signal.SIGKILL and os.read(read, 1) == b"", "until no process holds the pipe"
    os.close(read)
