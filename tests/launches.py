"""Jobs whose agents and ranks are forked from the test: a start costs no imports."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import accelerators
import pytest
import torch
import torch.distributed as dist
import warm

from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq.distributed import Job, World

FORK = multiprocessing.get_context("fork")
CPU = CommonConfig(cpu=True)
warm.preload()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks fork, which takes less time than to spawn them; variables are restored."""
    for module in (multiprocessing, torch.multiprocessing):
        monkeypatch.setattr(module, "get_context", lambda method=None: FORK)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that do nothing."""
    accelerators.found(monkeypatch, "cuda", 2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def srun(nodes: int) -> list[dict[str, str]]:
    """The variables of each of two tasks that srun started on one machine, which stands for *nodes*
    nodes."""
    step = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]" if nodes == 2 else "localhost",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURMD_NODENAME": "127.0.0.1",
    }
    return [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank if nodes == 1 else "0"} for rank in "01"]


def job(main: Callable[[Any, World], Any], value: Any = None, common: CommonConfig = CPU, **settings: Any) -> Job:
    return Job(main, value, common, DistributedConfig(**{"distributed_timeout": 60.0, **settings}))


def in_processes(*functions: Callable[[], Any], fail: bool = False) -> list[tuple[int | None, Any]]:
    """Exit code and result (None without one) of each of *functions*, in processes that run at the
    same time.

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


def described(value: Any, world: World) -> Any:
    """What a process knows of its job, and the sum of all ranks."""
    total = int(world.sum(torch.tensor(world.rank)))
    group = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    network = dist.get_backend(), group.options._timeout, os.environ.get("GLOO_SOCKET_IFNAME")
    return value, dataclasses.replace(world), total, network
