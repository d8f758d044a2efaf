"""SLURM's variables of a step make each task a rank, or the starter of its node's ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
from launches import job
from mistakes import user_error

from fairseq.distributed import launch, run
from fairseq.distributed.launch import Step, first_host, step_of
from fairseq.modules import devices

PORT = 20000 + (12345 + 2 * 7919) % 10000


def srun(tasks: int, nodes: int, without: str = "", **variables: str) -> dict[str, str]:
    """The variables of a task of srun, as SLURM 23.11 sets them, but for those in *without*."""
    step = {
        "SLURM_JOB_ID": "12345",
        "SLURM_STEP_ID": "2",
        "SLURM_NODELIST": "gpu[07-09,12]" if nodes > 1 else "gpu07",
        "SLURM_STEP_NODELIST": "gpu[07-09,12]" if nodes > 1 else "gpu07",
        "SLURM_NNODES": str(nodes),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        **variables,
    }
    return {name: value for name, value in step.items() if name not in without.split()}


def test_a_task_of_several_on_a_node_is_a_rank_with_torchs_variables() -> None:
    one, two = step_of(srun(2, 1)), step_of(srun(16, 2, SLURM_PROCID="9"))
    assert one == Step(1, 2, 1, 1, "127.0.0.1", PORT) and two == Step(9, 16, 2, 1, "gpu07", PORT)
    expected = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07", "MASTER_PORT": str(PORT)}
    assert two.variables(8, -1) == expected
    # srun bound one GPU to the task, whatever its number.
    assert two.variables(1, 4000) == {**expected, "LOCAL_RANK": "0", "MASTER_PORT": "4000"}


def test_variables_of_the_step_that_a_launcher_leaves_out_are_those_of_the_job() -> None:
    without = "SLURM_STEP_NUM_NODES SLURM_STEP_NODELIST"
    assert step_of(srun(16, 2, without)) == step_of(srun(16, 2))


@pytest.mark.parametrize(
    "environment, message",
    [
        (srun(2, 1, "SLURM_PROCID"), "^SLURM_PROCID: not set, although SLURM_STEP_NUM_TASKS=2; start the tasks"),
        (srun(2, 1, "SLURM_STEP_NUM_NODES SLURM_NNODES"), "^SLURM_STEP_NUM_NODES: not set"),
        (srun(2, 1, SLURM_LOCALID="x"), "^SLURM_LOCALID=x: the variable must be a whole number"),
    ],
)
def test_variables_that_name_no_task_are_one_line(environment: dict[str, str], message: str) -> None:
    with user_error(message):
        step_of(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"},  # a shell of salloc
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # a batch script, srun not used
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # one task of a larger job
    ],
)
def test_a_process_that_srun_did_not_start_with_others_is_alone(environment: dict[str, str]) -> None:
    assert step_of(environment) is None


@pytest.mark.parametrize(
    "settings, gpus, size",
    [({}, 8, 16), ({}, 0, 2), ({"nprocs_per_node": 3}, 8, 6), ({"distributed_world_size": 8}, 4, 8)],
)
def test_a_task_of_its_own_node_starts_the_nodes_ranks(
    settings: dict[str, int], gpus: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(os, "environ", srun(2, 2))
    monkeypatch.setattr(devices, "count", lambda: gpus)
    monkeypatch.setattr(launch, "_launch", lambda job, size, step: started.append((size, step.nodes)))
    run(job(print, None, launch.CommonConfig(), **settings))
    assert started == [(size, 2)]


def test_tasks_that_are_to_train_alone_say_so_and_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", srun(2, 1))
    assert run(job(lambda value, world: world.size, distributed_world_size=1)) == 1
    with user_error("^--distributed-world-size 3: srun started 2 tasks, which make 2 processes"):
        run(job(print, distributed_world_size=3))


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("login", "login"),
        ("gpu[07-09,12]", "gpu07"),
        ("rack[1-2]n[07,09-11],login", "rack1n07"),
        ("node-a.example.org,node-b", "node-a.example.org"),
    ],
)
def test_first_host_of_slurms_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
