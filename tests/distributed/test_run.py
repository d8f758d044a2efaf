"""A job's processes meet, run one function and end together, whoever starts them."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairseq.config import options
from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq.distributed import Job, World, launch, rendezvous, run
from fairseq.distributed.plan import Launch
from fairseq.distributed.workers import Failure
from fairseq.errors import UserError

FORK = multiprocessing.get_context("fork")
CPU = CommonConfig(cpu=True)
importlib.import_module("torch.distributed.nn.functional")  # once, before processes are forked


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers fork, which takes less time than to spawn them, and meet at once; variables are restored."""
    monkeypatch.setattr(torch.multiprocessing, "get_context", {"spawn": FORK}.__getitem__)
    monkeypatch.setattr(rendezvous, "_SLOWEST_START", 10.0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    gc.freeze()  # a process that ends its part collects its own garbage, not that of tests before it was forked
    yield
    gc.unfreeze()


def free_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def job(main: Callable[[Any, World], Any], value: Any = None, common: CommonConfig = CPU, **settings: Any) -> Job:
    return Job(main, value, common, DistributedConfig(**{"distributed_timeout": 60.0, **settings}))


def in_processes(*functions: Callable[[], Any], fail: bool = False) -> list[tuple[int | None, Any]]:
    """Exit code and result (None without one) of each of *functions*, in processes that run at the same time.

    Unless they are to *fail*, all end with the first that does.
    """

    def answer(function: Callable[[], Any], send: Any) -> None:
        send.send(function())

    ends = [FORK.Pipe(duplex=False) for _ in functions]
    processes = [FORK.Process(target=answer, args=(f, send)) for f, (_, send) in zip(functions, ends, strict=True)]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode and not fail:
                for other in running.values():
                    other.kill()
    results = [receive.recv() if receive.poll(0) else None for receive, _ in ends]
    return [(process.exitcode, result) for process, result in zip(processes, results, strict=True)]


def by_hand(main: Callable[[Any, World], Any], url: str, fail: bool = False, **settings: Any) -> list[Any]:
    """What comes of :func:`run` in each of two processes that were started by hand."""
    settings = {"distributed_world_size": 2, "distributed_init_method": url, **settings}

    def rank(number: int) -> Callable[[], Any]:
        return lambda: run(job(main, number, distributed_no_spawn=True, distributed_rank=number, **settings))

    return in_processes(rank(0), rank(1), fail=fail)


def described(value: Any, world: World) -> Any:
    """What a process knows of its job, and the sum of all ranks."""
    total = int(world.sum(torch.tensor(world.rank)))
    group = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    beats = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    facts = (dist.get_backend(), group.options._timeout, os.environ.get("GLOO_SOCKET_IFNAME"), len(beats))
    return value, world, total, facts


# ---- one process -----------------------------------------------------------------------------------------------------


def test_a_job_of_one_process_runs_here_and_returns_its_result() -> None:
    assert run(job(lambda value, world: (value, world), "value")) == ("value", World(0, 1, torch.device("cpu")))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "common, settings, variables, message",
    [
        (CPU, {"distributed_backend": "nccl"}, {}, "--distributed-backend nccl: needs a GPU, and there is none"),
        (CommonConfig(), {"distributed_backend": "nccl"}, {}, "--distributed-backend nccl: needs a GPU"),
        (CommonConfig(), {"local_rank": 1}, {}, "--device-id 1: there is no GPU; add --cpu"),
        (CPU, {"local_rank": 1}, {}, ""),
        (CommonConfig(), {"local_rank": 0}, {}, ""),
        (CommonConfig(), {"local_rank": 1}, {"RANK": "0", "WORLD_SIZE": "1"}, ""),  # torchrun's, which pass it on
        (CPU, {"distributed_backend": "gloo"}, {}, ""),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, common: CommonConfig, settings: Any, variables: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    os.environ.update(variables)
    started = job(lambda value, world: "ran", None, common, **settings)
    if message:
        with pytest.raises(UserError, match=f"^{message}"):
            run(started)
        return
    assert run(started) == "ran"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda with two GPUs that do nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.usefixtures("gpus")
def test_gpus_do_not_count_for_a_job_of_the_processor() -> None:
    assert run(job(lambda value, world: world.device.type, None)) == "cpu"
    with pytest.raises(UserError, match="--distributed-backend nccl: needs a GPU"):
        run(job(lambda value, world: "ran", None, distributed_backend="nccl"))
    nccl = job(lambda value, world: "ran", None, CommonConfig(), distributed_backend="nccl", distributed_world_size=1)
    assert run(nccl) == "ran"


# ---- processes started by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_processes_started_by_hand_meet_at_an_address_or_in_a_file(tmp_path: Path, kind: str) -> None:
    url = free_url() if kind == "tcp" else f"file://{tmp_path}/meeting"

    def main(value: Any, world: World) -> Any:
        return described(value, world)

    loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    facts = ("gloo", timedelta(seconds=60), loopback if kind == "tcp" else None, 1)
    worlds = [World(rank, 2, torch.device("cpu"), 60.0) for rank in range(2)]
    assert by_hand(main, url) == [(0, (rank, worlds[rank], 1, facts)) for rank in range(2)]


def test_torchruns_processes_meet_in_its_store() -> None:
    server, url = rendezvous.listen(None, 60)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": url.rpartition(":")[2]}
    os.environ.update({**variables, "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "1"})

    def rank(number: int) -> Callable[[], Any]:
        def start() -> Any:
            os.environ["RANK"] = str(number)
            return run(job(lambda value, world: (world.rank, int(world.sum(torch.ones(1))))))

        return start

    assert in_processes(rank(0), rank(1)) == [(0, (0, 2)), (0, (1, 2))]
    assert server.check(["attempt 0/joined/0"])


def test_a_process_that_has_ended_its_part_leaves_nothing_behind() -> None:
    def main(value: Any, world: World) -> None:
        world.barrier()

    url = free_url()

    def rank(number: int) -> Callable[[], Any]:
        def start() -> Any:
            settings = {"distributed_world_size": 2, "distributed_init_method": url, "distributed_no_spawn": True}
            run(job(main, None, distributed_rank=number, **settings))
            return dist.is_initialized(), [thread.name for thread in threading.enumerate()]

        return start

    assert [result for _, result in in_processes(rank(0), rank(1))] == [(False, ["MainThread"])] * 2


def test_a_process_that_fails_is_named_by_the_others_which_end(capfd: pytest.CaptureFixture[str]) -> None:
    def main(value: Any, world: World) -> None:
        world.barrier()
        if world.rank == 1:
            raise ValueError("the disk is on fire")
        world.barrier()

    (first, _), (second, _) = by_hand(main, free_url(), fail=True)
    assert first == second == 1
    error = capfd.readouterr().err
    assert "process 1 of 2 failed:\nValueError: the disk is on fire\n" in error
    assert "ValueError: the disk is on fire" in error.replace("process 1 of 2 failed:\nValueError", "")


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_users_mistake_in_one_process_is_one_line_and_code_2_in_all(
    capfd: pytest.CaptureFixture[str], others_wait: bool
) -> None:
    def main(value: Any, world: World) -> None:
        world.barrier()
        if world.rank == 1:
            raise UserError("--flag: of no use")
        if not others_wait:
            time.sleep(1e6)
        world.barrier()

    settings = {"distributed_world_size": 2, "distributed_init_method": free_url(), "distributed_timeout": 2.0}

    def rank(number: int) -> Callable[[], Any]:
        one = job(main, distributed_no_spawn=True, distributed_rank=number, **settings)
        return lambda: options.run_program(lambda: run(one))

    assert [code for code, _ in in_processes(rank(0), rank(1), fail=True)] == [2, 2]
    one, other = sorted(capfd.readouterr().err.splitlines())
    assert one.endswith(": error: --flag: of no use")
    assert other in (one, "process 1 of 2 failed: --flag: of no use")


def test_a_process_that_hangs_is_named_with_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    def main(value: Any, world: World) -> None:
        world.barrier()
        if world.rank == 1:
            time.sleep(1e6)
        world.barrier()

    (first, _), (second, _) = by_hand(main, free_url(), fail=True, distributed_timeout=1.0)
    assert first == second == 1
    error = capfd.readouterr().err
    assert "process 1 of 2 failed:\nhangs at tests/distributed/test_run.py:" in error
    assert ": the others waited 1 s for it (--distributed-timeout)\n" in error


@pytest.mark.parametrize("kind", ["stopped", "gone"])
def test_a_process_that_is_stopped_or_gone_ends_the_others(capfd: pytest.CaptureFixture[str], kind: str) -> None:
    def main(value: Any, world: World) -> None:
        world.barrier()
        if world.rank == 1:
            if kind == "gone":
                os._exit(7)
            child = os.fork()  # which continues this process once the other one has ended
            if child == 0:
                time.sleep(2)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1e6)

    (first, _), (second, _) = by_hand(main, free_url(), fail=True, distributed_timeout=1.0)
    assert (first, second) == (1, 7 if kind == "gone" else -9)
    assert "process 1 of 2 failed:\nno heartbeat for 0.7 s: it is stopped" in capfd.readouterr().err


@pytest.mark.parametrize("code", [143, 5])
def test_processes_that_exit_together_do_so_with_their_code(capfd: pytest.CaptureFixture[str], code: int) -> None:
    def main(value: Any, world: World) -> None:
        sys.exit(code)

    assert by_hand(main, free_url(), fail=True) == [(code, None)] * 2
    assert capfd.readouterr().err == ""


def test_a_signal_ends_the_group_before_the_process() -> None:
    url = free_url()

    def main(value: Any, world: World) -> None:
        sys.exit(143)

    def rank(number: int) -> Callable[[], Any]:
        def start() -> Any:
            settings = {"distributed_world_size": 2, "distributed_init_method": url, "distributed_no_spawn": True}
            with pytest.raises(SystemExit) as end:
                run(job(main, None, distributed_rank=number, **settings))
            return end.value.code, dist.is_initialized(), threading.active_count()

        return start

    assert [result for _, result in in_processes(rank(0), rank(1))] == [(143, False, 1)] * 2


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
    capfd: pytest.CaptureFixture[str], action: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
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
    with pytest.raises(UserError, match="--distributed-backend nccl: needs a GPU"):
        run(job(write, None, distributed_world_size=2, distributed_backend="nccl"))


# ---- other nodes -----------------------------------------------------------------------------------------------------

SECOND = Launch(4, 2, 2)


@pytest.mark.parametrize("code, told", [(1, b"2 1 gone"), (2, b"2 2 gone"), (143, b"")])
def test_a_node_that_fails_tells_the_others_and_one_that_stops_need_not(code: int, told: bytes) -> None:
    store, url = rendezvous.listen(None, 60)
    store.set("failure", "")
    launch._tell_other_nodes(url, SECOND, Failure(2, code, "gone"))
    assert store.get("failure") == told


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
