"""SLURM's variables of a step make each task a rank, or the starter of its node's ranks."""

from __future__ import annotations

from typing import Any

import pytest
from mistakes import user_error

from fairseq.config.settings import DistributedConfig
from fairseq.distributed.slurm import Task, first_host, task_of


def srun(tasks: int, nodes: int, rank: int = 1, **variables: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "12345",
        "SLURM_STEP_ID": "2",
        "SLURM_STEP_NODELIST": "gpu[07-09,12]" if nodes > 1 else "gpu07",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "1",
        **variables,
    }


def task(environment: dict[str, str], gpus: int = 0, **settings: Any) -> Task | None:
    return task_of(DistributedConfig(**settings), gpus, environment)


PORT = 20000 + (12345 + 2 * 7919) % 10000


def test_a_task_of_several_on_a_node_is_a_rank_with_torchs_variables() -> None:
    on_one, on_two = task(srun(2, 1), 8), task(srun(16, 2, rank=9), 8)
    assert on_one == Task(1, 2, 0, 1, "127.0.0.1", PORT) and on_two == Task(9, 16, 0, 1, "gpu07", PORT)
    assert on_two.variables == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(PORT),
    }


@pytest.mark.parametrize(
    "settings, gpus, processes", [({}, 8, 8), ({}, 0, 1), ({"nprocs_per_node": 3}, 8, 3), ({}, 1, 1)]
)
def test_a_task_of_its_own_node_starts_the_nodes_ranks(settings: dict[str, int], gpus: int, processes: int) -> None:
    found = task(srun(2, 2), gpus, **settings)
    assert found is not None and (found.rank, found.count, found.processes) == (1, 2, processes)


def test_a_task_that_sees_one_gpu_uses_it_whatever_its_number() -> None:
    found = task(srun(2, 1), 1)
    assert found is not None and found.local_rank == 0


def test_ports_of_steps_are_not_privileged_nor_short_lived_and_differ_between_jobs_and_steps() -> None:
    def port(job: int, step: int) -> int:
        found = task(srun(2, 1, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)))
        assert found is not None
        return found.port

    ports = {(job, step): port(job, step) for job in range(9990, 10010) for step in range(4)}
    assert len(set(ports.values())) == len(ports) and ports[10000, 0] == 20000 and ports[9999, 0] == 29999
    assert task(srun(2, 1), distributed_port=4000) == Task(1, 2, 0, 1, "127.0.0.1", 4000)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"},  # a shell of salloc
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # a batch script, srun not used
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # one task of a larger job
    ],
)
def test_a_process_that_srun_did_not_start_with_others_is_alone(environment: dict[str, str]) -> None:
    assert task(environment) is None


def test_tasks_that_are_to_train_alone_say_so_and_other_numbers_are_refused() -> None:
    assert task(srun(2, 1), distributed_world_size=1) is None
    assert task(srun(2, 2), 4, distributed_world_size=8) is not None
    with user_error("^--distributed-world-size 3: srun started 2 tasks, which make 2 processes"):
        task(srun(2, 1), distributed_world_size=3)


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[3,1]x", "gpu3x"),
        ("rack[1-2]n[07,09-11],login", "rack1n07"),
        ("node-a.example.org,node-b", "node-a.example.org"),
        ("", ""),
    ],
)
def test_first_host_of_slurms_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host
