"""A job runs here, or on as many processes as flags, GPUs and the environment say; ranks connect
and end together."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import accelerators
import pytest
import torch
import torch.distributed as dist
from launches import CPU, described, free_port, in_processes, job
from mistakes import user_error

from fairseq.config.settings import CommonConfig
from fairseq.distributed import World, launch, run
from fairseq.errors import UserError
from fairseq.modules import devices
from fairseq.system.program import as_program

pytestmark = pytest.mark.usefixtures("forked")
LO = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def ranks(main: Callable[[Any, World], Any], size: int = 2, fail: bool = False, **settings: Any) -> list[Any]:
    """Exit code and result of each of *size* processes that have torch's variables, as torchrun and
    srun set them."""
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def one(number: int) -> Callable[[], Any]:
        def start() -> Any:
            os.environ.update(place, RANK=str(number))
            result = run(job(main, number, **settings))
            return result, dist.is_initialized(), threading.active_count()

        return start

    return in_processes(*map(one, range(size)), fail=fail)


# ---- processes of flags ------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of processes that jobs would start."""
    sizes: list[int] = []
    monkeypatch.setattr(launch, "_launch", lambda job, size, step: sizes.append(size))
    return sizes


@pytest.mark.parametrize(
    "settings, gpus, size",
    [
        ({}, 8, 8),
        ({"nprocs_per_node": 2}, 2, 2),
        ({"distributed_world_size": 2}, 8, 2),
        ({"distributed_world_size": 2, "nprocs_per_node": 4}, 8, 2),
        ({"distributed_world_size": 3}, None, 3),
        ({"nprocs_per_node": 3}, None, 3),
        ({"max_restarts": 1}, None, 1),
    ],
)
def test_processes_of_one_machine(
    started: list[int], monkeypatch: pytest.MonkeyPatch, settings: Any, gpus: int | None, size: int
) -> None:
    monkeypatch.setattr(devices, "count", lambda: gpus)
    run(job(lambda value, world: None, None, CommonConfig(cpu=gpus is None), **settings))
    assert started == [size]


@pytest.mark.parametrize("variables", [{}, {"RANK": "3"}, {"WORLD_SIZE": "2"}])
@pytest.mark.parametrize("common", [CPU, CommonConfig()])
def test_a_job_of_one_process_runs_here_and_returns_its_result(
    common: CommonConfig, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count", lambda: 0)
    os.environ.update(variables)  # one alone is left over from something else
    answer = run(job(lambda value, world: (value, world), "value", common))
    assert answer == ("value", World(0, 1, torch.device("cpu")))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "settings, gpus, variables, message",
    [
        ({"distributed_world_size": 4}, 2, {}, "--distributed-world-size 4: this machine has 2 GPUs; add --cpu"),
        ({"nprocs_per_node": 4}, 2, {}, "--nprocs-per-node 4: this machine has 2 GPUs"),
        (
            {"distributed_world_size": 4, "nprocs_per_node": 2},
            None,
            {},
            "4: more than --nprocs-per-node; start several",
        ),
        ({"nprocs_per_node": 10**7}, None, {}, "--nprocs-per-node 10000000"),
        ({"distributed_world_size": 10**7}, None, {}, "--distributed-world-size 10000000"),
        ({}, None, {"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE=-2: the variable must be a whole number"),
        ({}, None, {"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first: the variable must be a whole number"),
        ({}, None, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: ranks of WORLD_SIZE=2 are numbered from 0"),
        ({}, None, {"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0: ranks of WORLD_SIZE=0 are numbered from 0"),
        ({}, None, {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT: .*MASTER_ADDR expected"),
        ({"max_restarts": 1}, None, {"RANK": "0", "WORLD_SIZE": "2"}, "--max-restarts: another program started"),
    ],
)
def test_contradictions_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, settings: Any, gpus: int | None, variables: dict[str, str], message: str
) -> None:
    monkeypatch.setattr(devices, "count", lambda: gpus)
    os.environ.update(variables)
    with user_error(message):
        run(job(lambda value, world: None, None, CommonConfig(cpu=gpus is None), **settings))


NCCL = "--distributed-backend nccl: needs a GPU, and there is none; use gloo"


@pytest.mark.parametrize(
    "common, settings, variables, message",
    [
        (CPU, {"distributed_backend": "nccl"}, {"RANK": "0", "WORLD_SIZE": "2"}, NCCL),
        (CommonConfig(), {"distributed_backend": "nccl"}, {"RANK": "0", "WORLD_SIZE": "2"}, NCCL),
        (CPU, {"distributed_backend": "nccl", "distributed_world_size": 2}, {}, NCCL),
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


# ---- ranks of torchrun and srun ----------------------------------------------------------------


def test_ranks_connect_on_the_loopback_and_leave_nothing_behind() -> None:
    worlds = [World(number, 2, torch.device("cpu"), 60.0) for number in range(2)]
    answers = [(number, worlds[number], 1, ("gloo", timedelta(seconds=60), LO)) for number in range(2)]
    assert ranks(described) == [(0, (answer, False, 1)) for answer in answers]


@pytest.mark.parametrize("device, asked", [("cuda:1", "nccl on cuda:1"), ("cpu", "gloo on None")])
def test_gpus_talk_over_nccl_bound_to_them_and_processors_over_gloo(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: str
) -> None:
    def refuse(backend: str, device_id: Any = None, **_: Any) -> None:
        raise UserError(f"asked for {backend} on {device_id}")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setattr(launch, "device_of", lambda *_: torch.device(device))
    os.environ.update(RANK="0", WORLD_SIZE="2")
    with user_error(f"^asked for {asked}$"):
        launch._join(job(described))


@pytest.mark.parametrize("code", [143, 5])
def test_ranks_that_exit_together_do_so_with_their_code(capfd: pytest.CaptureFixture[str], code: int) -> None:
    def main(value: Any, world: World) -> None:
        world.barrier()  # rank 0, which has the store, must not end before the other has connected to it
        sys.exit(code)

    assert ranks(main, fail=True) == [(code, None)] * 2
    assert capfd.readouterr().err == ""


def test_a_users_mistake_is_one_line_and_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    def main(value: Any, world: World) -> None:
        raise UserError("`flag`: of no use")

    def start() -> None:
        os.environ.update(RANK="0", WORLD_SIZE="1")
        with as_program():
            run(job(main))

    assert in_processes(start, fail=True) == [(2, None)]
    assert capfd.readouterr().err.endswith(": error: --flag: of no use\n")


def test_a_rank_without_an_agent_fails_at_once_when_another_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    def main(value: Any, world: World) -> None:
        world.barrier()
        if world.rank == 1:
            os._exit(7)
        world.barrier()

    assert [code for code, _ in ranks(main, fail=True)] == [1, 7]
    assert re.search("Connection (closed|reset) by peer", capfd.readouterr().err)
