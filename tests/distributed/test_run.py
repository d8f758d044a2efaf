"""A job's processes, each started by itself, meet, run one function and end together."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerators
import pytest
import torch
import torch.distributed as dist
from launches import CPU, described, free_url, in_processes, job
from mistakes import user_error

from fairseq.config import options
from fairseq.config.settings import CommonConfig
from fairseq.distributed import World, launch, rendezvous, run
from fairseq.errors import UserError

pytestmark = pytest.mark.usefixtures("forked")


def by_hand(main: Callable[[Any, World], Any], url: str, fail: bool = False, **settings: Any) -> list[Any]:
    """What comes of :func:`run` in each of two processes that were started by hand."""
    settings = {"distributed_world_size": 2, "distributed_init_method": url, **settings}

    def rank(number: int) -> Callable[[], Any]:
        return lambda: run(job(main, number, distributed_no_spawn=True, distributed_rank=number, **settings))

    return in_processes(rank(0), rank(1), fail=fail)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_a_job_of_one_process_runs_here_and_returns_its_result() -> None:
    assert run(job(lambda value, world: (value, world), "value")) == ("value", World(0, 1, torch.device("cpu")))
    assert not dist.is_initialized()


NCCL = "--distributed-backend nccl: needs a GPU, and there is none; use gloo"


@pytest.mark.parametrize(
    "common, settings, variables, message",
    [
        (CPU, {"distributed_backend": "nccl"}, {"RANK": "0", "WORLD_SIZE": "2"}, NCCL),
        (CommonConfig(), {"distributed_backend": "nccl"}, {"RANK": "0", "WORLD_SIZE": "2"}, NCCL),
        (CPU, {"distributed_backend": "nccl"}, {}, ""),  # of one process, as in fairseq's commands for any machine
        (CommonConfig(), {"distributed_backend": "nccl"}, {}, ""),
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
    accelerators.found(monkeypatch, None)
    os.environ.update(variables)
    started = job(lambda value, world: "ran", None, common, **settings)
    if message:
        with user_error(f"^{message}"):
            run(started)
        return
    assert run(started) == "ran"


@pytest.mark.usefixtures("gpus")
def test_gpus_do_not_count_for_a_job_of_the_processor() -> None:
    assert run(job(lambda value, world: world.device.type, None)) == "cpu"
    nccl = job(lambda value, world: "ran", None, CommonConfig(), distributed_backend="nccl", distributed_world_size=1)
    assert run(nccl) == "ran"


@pytest.mark.parametrize("device, backend", [("cuda:1", "nccl"), ("cpu", "gloo")])
def test_gpus_talk_over_nccl_and_processors_over_gloo(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    def refuse(backend: str, **_: Any) -> None:
        raise UserError(f"asked for {backend}")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    _, url = rendezvous.listen(None, 60)
    with pytest.raises(UserError, match=f"^asked for {backend}$"):
        fail = functools.partial(launch._fail_alone, 1)
        launch._join(job(described), World(0, 1, torch.device(device), 60.0), url, fail)


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
    # Its own message, which begins with the program's name, comes first or second.
    one, other = sorted(capfd.readouterr().err.splitlines(), key=lambda line: ": error: " not in line)
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
        world.barrier()  # rank 0, which has the store, must not end before the other has met it
        sys.exit(code)

    assert by_hand(main, free_url(), fail=True) == [(code, None)] * 2
    assert capfd.readouterr().err == ""


def test_a_signal_ends_the_group_before_the_process() -> None:
    url = free_url()

    def main(value: Any, world: World) -> None:
        world.barrier()  # the other one must have met this one before it ends
        sys.exit(143)

    def rank(number: int) -> Callable[[], Any]:
        def start() -> Any:
            settings = {"distributed_world_size": 2, "distributed_init_method": url, "distributed_no_spawn": True}
            with pytest.raises(SystemExit) as end:
                run(job(main, None, distributed_rank=number, **settings))
            return end.value.code, dist.is_initialized(), threading.active_count()

        return start

    assert [result for _, result in in_processes(rank(0), rank(1))] == [(143, False, 1)] * 2
