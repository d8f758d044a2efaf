"""A launcher starts the workers of a machine, which end together, and those of other machines with them."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import described, free_url, in_processes, job
from mistakes import user_error

from fairseq.config.settings import CommonConfig
from fairseq.distributed import World, launch, rendezvous, run
from fairseq.distributed.plan import Launch
from fairseq.distributed.workers import Failure
from fairseq.errors import UserError

pytestmark = pytest.mark.usefixtures("forked")


# ---- workers ---------------------------------------------------------------------------------------------------------


def write(folder: Path, world: World) -> None:
    """What this worker knows, in a file of its rank."""
    _, _, total, facts = described(None, world)
    (folder / str(world.rank)).write_text(f"{world} {total} {facts} {os.environ.get('OMP_NUM_THREADS')}")


def written(folder: Path, size: int, threads: Any, device: str = "cpu", loopback: bool = True, first: int = 0) -> None:
    """Assert that each worker of a job of *size* has written what it ought to know."""
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0")) if loopback else None
    facts = ("gloo", timedelta(seconds=60), name, 1)
    total = sum(range(size))
    for rank in range(size):
        world = World(rank, size, torch.device(device if device == "cpu" else f"{device}:{rank}"), 60.0)
        assert (folder / str(rank)).read_text() == f"{world} {total} {facts} {threads}"


@pytest.mark.parametrize("cores, threads", [(7, 3), (1, 1), (None, 1)])
def test_workers_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None, threads: int
) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    started = job(write, tmp_path, distributed_world_size=2)
    monkeypatch.setattr("fairseq.distributed.plan.check_processes", lambda flag, count: None)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert run(started) is None
    written(tmp_path, 2, threads)


def test_the_only_worker_of_a_machine_of_unknown_cores_has_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    launch._spawn(job(write, tmp_path), Launch(1, count=1))
    written(tmp_path, 1, 1)


def test_threads_are_the_users_choice_and_workers_may_meet_in_a_file(tmp_path: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "5"
    url = f"file://{tmp_path}/meeting"
    run(job(write, tmp_path, distributed_world_size=2, distributed_init_method=url))
    written(tmp_path, 2, 5, loopback=False)


@pytest.mark.usefixtures("gpus")
def test_each_worker_has_the_gpu_of_its_place(tmp_path: Path) -> None:
    os.environ.pop("OMP_NUM_THREADS", None)
    run(job(write, tmp_path, CommonConfig(), distributed_backend="gloo"))
    written(tmp_path, 2, None, "cuda")


def test_launchers_started_by_hand_are_nodes_of_one_job(tmp_path: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    nodes = {"distributed_world_size": 4, "nprocs_per_node": 2, "distributed_init_method": free_url()}

    def node(first: int) -> Callable[[], Any]:
        return lambda: run(job(write, tmp_path, distributed_rank=first, **nodes))

    assert in_processes(node(0), node(2)) == [(0, None)] * 2
    written(tmp_path, 4, 1)


class Plugged:
    """A value that can be unpickled where its plug-in has been imported."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("plug_in_of_a_job",)


def call(value: Any, world: World) -> None:
    value.called(world)


def test_workers_import_plug_ins_before_the_value(tmp_path: Path) -> None:
    folder = tmp_path / "plug_in_of_a_job"
    folder.mkdir()
    code = f"from pathlib import Path\n\ndef called(world):\n    Path({str(tmp_path)!r}, str(world.rank)).touch()\n"
    (folder / "__init__.py").write_text(code)
    run(job(call, Plugged(), CommonConfig(cpu=True, user_dir=str(folder)), distributed_world_size=2))
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
    with pytest.raises(SystemExit, match="1"):
        run(job(call, Plugged(), distributed_world_size=2))


def fail(action: str, world: World) -> None:
    world.barrier()
    if world.rank == 1:
        if action == "mistake":
            raise UserError("--flag: of no use")
        if action == "memory":
            raise MemoryError("out of memory")
        if action == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "error":
            raise ValueError("the disk\033[2J is on fire")
    if action == "signal":
        sys.exit(143)
    world.barrier()


@pytest.mark.parametrize(
    "action, message", [("mistake", "^--flag: of no use$"), ("memory", "^out of host memory: lower --max-tokens")]
)
def test_a_users_mistake_in_a_worker_is_the_launchers(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, action: str, message: str
) -> None:
    monkeypatch.setattr(launch, "_tell_other_nodes", None)  # there are none
    with user_error(message):
        run(job(fail, action, distributed_world_size=2))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "action, code, start, end",
    [
        ("killed", 1, "process 1 of 2 failed:\nkilled by signal 9 (SIGKILL)\n", ""),
        ("error", 1, "process 1 of 2 failed:\nTraceback (most", "ValueError: the disk\\x1b[2J is on fire"),
        ("signal", 143, "", ""),
    ],
)
def test_a_worker_that_fails_or_stops_ends_the_launcher(
    capfd: pytest.CaptureFixture[str], action: str, code: int, start: str, end: str
) -> None:
    with pytest.raises(SystemExit) as exit:
        run(job(fail, action, distributed_world_size=2))
    assert exit.value.code == code
    error = capfd.readouterr().err
    assert error.startswith(start) and error.rstrip().endswith(end) and bool(error) == bool(start)


def test_settings_that_need_a_gpu_are_refused_in_workers_too() -> None:
    with user_error("--distributed-backend nccl: needs a GPU"):
        run(job(write, None, distributed_world_size=2, distributed_backend="nccl"))


@pytest.mark.parametrize("pickled, code", [(True, 2), (False, 1)])
def test_a_worker_that_cannot_begin_reports_its_rank(monkeypatch: pytest.MonkeyPatch, pickled: bool, code: int) -> None:
    told: list[Any] = []

    def refuse(*_: Any) -> None:
        raise UserError("no rendezvous")

    monkeypatch.setattr(launch, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(launch, "end_with_launcher", lambda: None)
    monkeypatch.setattr(launch, "leave", lambda *message: told.append(message))
    monkeypatch.setattr(launch.rendezvous, "connect", refuse)
    value = pickle.dumps(job(write)) if pickled else b""
    launch._worker("messages", 3, 1, None, value, 4, "tcp://nowhere:1")
    ((messages, failure),) = told
    assert (messages, failure.rank, failure.code) == ("messages", 3, code)
    assert ("no rendezvous" if pickled else "EOFError") in failure.reason


@pytest.mark.parametrize(
    "error, where", [(MemoryError(), "host"), (torch.OutOfMemoryError("CUDA out of memory. Tried"), "GPU")]
)
def test_memory_that_is_exhausted_is_the_hosts_or_the_gpus(error: Exception, where: str) -> None:
    failure = launch._failure(3, error)
    assert (failure.rank, failure.code) == (3, 2) and failure.reason.startswith(f"out of {where} memory: lower")


# ---- other nodes -----------------------------------------------------------------------------------------------------

SECOND = Launch(4, 2, 2)


@pytest.mark.parametrize("code, told", [(1, b"2 1 gone"), (2, b"2 2 gone"), (143, b"")])
def test_a_node_that_fails_tells_the_others_and_one_that_stops_need_not(code: int, told: bytes) -> None:
    store, url = rendezvous.listen(None, 60)
    store.set("failure", "")
    launch._tell_other_nodes(url, SECOND, Failure(2, code, "gone"))
    assert store.get("failure") == told


def test_other_nodes_are_told_in_a_file(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    store = rendezvous.connect(url, 0, 4, 60)
    store.set("failure", "")
    launch._tell_other_nodes(url, SECOND, Failure(2, 1, "gone"))
    assert store.get("failure") == b"2 1 gone"


def test_the_address_of_other_nodes_is_tried_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(rendezvous, "is_reachable", lambda *arguments: tried.append(arguments))
    launch._tell_other_nodes("tcp://node0:80", SECOND, Failure(2, 1, "gone"))
    assert tried == [("tcp://node0:80", launch._QUICK)]


@pytest.mark.parametrize("error", [UserError("there is no store"), RuntimeError("it is closed")])
def test_a_node_that_cannot_tell_the_others_says_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse(*_: Any) -> None:
        raise error

    uncaught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    monkeypatch.setattr(rendezvous, "connect", refuse)
    launch._tell_other_nodes("file:///nowhere", SECOND, Failure(2, 1, "gone"))
    assert not uncaught


def kill_last(value: Any, world: World) -> None:
    world.barrier()
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1e6)


def test_a_failure_of_a_node_ends_the_others_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    nodes = {"distributed_world_size": 4, "nprocs_per_node": 2, "distributed_init_method": free_url()}

    def node(first: int) -> Callable[[], Any]:
        return lambda: run(job(kill_last, None, distributed_rank=first, distributed_timeout=20.0, **nodes))

    assert in_processes(node(0), node(2), fail=True) == [(1, None)] * 2
    lines = "process 3 of 4 failed:\nkilled by signal 9 (SIGKILL)\n"
    assert capfd.readouterr().err == lines * 2


@pytest.mark.parametrize("kind", ["gone", "stopped"])
def test_a_node_does_not_wait_for_a_store_that_is_gone_or_stopped(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(launch, "_QUICK", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if kind == "stopped":
            silent.listen()
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        def tell() -> list[tuple[str, bool]]:
            launch._tell_other_nodes(url, SECOND, Failure(2, 1, "gone"))
            return [(thread.name, thread.daemon) for thread in threading.enumerate()[1:]]

        ((code, left),) = in_processes(tell)
    assert code == 0 and left == ([("publish", True)] if kind == "stopped" else [])
