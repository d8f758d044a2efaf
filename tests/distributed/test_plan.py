"""The part of a job that a process is or starts, by flags, torchrun's variables or SLURM's."""

from __future__ import annotations

import pytest
from mistakes import user_error

from fairseq.config.settings import DistributedConfig
from fairseq.distributed.plan import Launch, first_host, plan
from fairseq.errors import UserError

URL = "tcp://node0:29500"


def flags(**settings):
    return DistributedConfig(**settings)


@pytest.mark.parametrize(
    "settings, cpu, gpus, expected",
    [
        ({}, False, 8, Launch(8, 0, 8)),
        ({}, False, 0, Launch(1)),
        ({}, True, 0, Launch(1)),
        ({"local_rank": 3, "distributed_world_size": 1}, False, 8, Launch(1, local_rank=3)),
        ({"distributed_world_size": 3}, True, 0, Launch(3, 0, 3)),
        ({"nprocs_per_node": 3}, True, 0, Launch(3, 0, 3)),
        ({"nprocs_per_node": 2}, False, 2, Launch(2, 0, 2)),
        ({"distributed_world_size": 1, "distributed_rank": 1}, True, 0, Launch(1)),
        ({"distributed_world_size": 1, "distributed_no_spawn": True, "local_rank": 1}, False, 2, Launch(1, 0, 0, 1)),
        ({"distributed_world_size": 2, "distributed_port": 0}, True, 0, Launch(2, 0, 2)),
        ({"distributed_world_size": 2, "distributed_port": 1}, True, 0, Launch(2, 0, 2, url="tcp://127.0.0.1:1")),
        (
            {"distributed_world_size": 2, "distributed_port": 4000},
            False,
            2,
            Launch(2, 0, 2, url="tcp://127.0.0.1:4000"),
        ),
    ],
)
def test_one_machine(settings, cpu, gpus, expected):
    assert plan(flags(**settings), cpu, gpus, {}) == expected


@pytest.mark.parametrize(
    "settings, cpu, gpus, expected",
    [
        ({"distributed_world_size": 16}, False, 8, Launch(16, 0, 8, url=URL)),
        ({"distributed_world_size": 16, "distributed_rank": 8}, False, 8, Launch(16, 8, 8, url=URL)),
        ({"distributed_world_size": 4, "distributed_rank": 2, "nprocs_per_node": 2}, True, 0, Launch(4, 2, 2, url=URL)),
        ({"distributed_world_size": 10, "distributed_rank": 8}, False, 8, Launch(10, 8, 2, url=URL)),
        (
            {"distributed_world_size": 4, "distributed_rank": 3, "local_rank": 1, "distributed_no_spawn": True},
            *(False, 2, Launch(4, 3, local_rank=1, url=URL)),
        ),
    ],
)
def test_several_machines_by_hand(settings, cpu, gpus, expected):
    assert plan(flags(distributed_init_method=URL, **settings), cpu, gpus, {}) == expected


def test_torchrun_comes_before_flags_and_slurm():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    assert plan(flags(distributed_world_size=2), False, 4, torchrun) == Launch(8, 5, local_rank=1, url="env://")


def test_torchrun_is_told_by_rank_and_size_and_the_gpu_is_the_ranks_without_a_local_one():
    assert plan(flags(), False, 4, {"RANK": "3", "WORLD_SIZE": "8"}) == Launch(8, 3, local_rank=3, url="env://")
    for alone in ("RANK", "WORLD_SIZE"):
        assert plan(flags(), True, 0, {alone: "2"}) == Launch(1)


def test_flags_of_the_rendezvous_come_before_slurm():
    cfg = flags(distributed_init_method=URL, distributed_world_size=4, nprocs_per_node=2, distributed_rank=2)
    assert plan(cfg, True, 0, srun(2, 2)) == Launch(4, 2, 2, url=URL)


def srun(tasks, nodes, rank=1, **variables):
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


def test_task_a_process_and_their_port_is_the_steps():
    on_one = plan(flags(), False, 8, srun(2, 1))
    assert (on_one.size, on_one.first, on_one.count, on_one.local_rank) == (2, 1, 0, 1)
    assert on_one.url is not None and on_one.url.startswith("tcp://127.0.0.1:")
    on_two = plan(flags(), False, 8, srun(16, 2, rank=9))
    assert on_two == Launch(16, 9, local_rank=1, url=on_one.url.replace("127.0.0.1", "gpu07"))
    assert plan(flags(), False, 8, srun(2, 1, SLURM_STEP_ID="3")).url != on_one.url
    assert plan(flags(distributed_port=4000), False, 8, srun(2, 1)).url == "tcp://127.0.0.1:4000"


def test_ports_of_steps_are_not_privileged_nor_short_lived_and_differ_between_jobs_and_steps():
    def port(job, step):
        url = plan(flags(), False, 8, srun(2, 1, SLURM_JOB_ID=str(job), SLURM_STEP_ID=step)).url
        return int(url.rpartition(":")[2])

    ports = {(job, step): port(job, str(step)) for job in range(9990, 10010) for step in range(4)}
    assert len(set(ports.values())) == len(ports) and ports[10000, 0] == 20000 and ports[9999, 0] == 29999
    assert ports[9990, 1] == 20000 + 9990 + 7919 - 10000, "the same in every release: tasks may have several"
    assert port(7, "batch") == port(7, "0") == 20007


def test_a_step_without_a_number_has_the_port_of_the_jobs_first():
    variables = srun(2, 1)
    del variables["SLURM_STEP_ID"]
    assert plan(flags(), False, 8, variables).url == "tcp://127.0.0.1:22345"
    assert plan(flags(distributed_port=1), False, 8, variables).url == "tcp://127.0.0.1:1"
    assert plan(flags(distributed_port=0), False, 8, variables).url == "tcp://127.0.0.1:22345"


@pytest.mark.parametrize("count", ["SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"])
@pytest.mark.parametrize("nodes", ["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"])
def test_nodes_are_those_of_the_step_or_else_of_the_job(count, nodes):
    variables = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", count: "2", nodes: "gpu[07-08]"}
    assert plan(flags(), True, 0, variables) == Launch(4, 3, local_rank=3, url="tcp://gpu07:20007")
    assert plan(flags(), True, 0, {**variables, count: "4"}) == Launch(4, 3, local_rank=3, url="tcp://gpu07:20007")
    del variables[count]
    assert plan(flags(), True, 0, variables).url == "tcp://gpu07:20007"
    assert plan(flags(), True, 0, {**variables, nodes: "gpu1,gpu2"}).url == "tcp://gpu1:20007"
    assert plan(flags(), True, 0, {**variables, nodes: "gpu07"}).url == "tcp://127.0.0.1:20007"


def test_nodes_without_a_list_have_no_first_host():
    variables = srun(2, 2)
    del variables["SLURM_STEP_NODELIST"]
    with pytest.raises(UserError, match="^SLURM_NODELIST: not set"):
        plan(flags(), True, 0, variables)


def test_task_a_node_starts_as_many_processes_as_it_is_told():
    cfg = flags(nprocs_per_node=2, distributed_port=4000)
    assert plan(cfg, False, 8, srun(4, 4)) == Launch(8, 2, 2, url="tcp://gpu07:4000")
    assert plan(flags(distributed_world_size=32, distributed_port=4000), False, 8, srun(4, 4)).size == 32


def test_task_a_node_starts_a_process_a_gpu():
    started = plan(flags(distributed_port=4000), False, 8, srun(4, 4))
    assert started == Launch(32, 8, 8, url="tcp://gpu07:4000")
    assert plan(flags(distributed_port=4000), False, 1, srun(4, 4)) == Launch(4, 1, local_rank=0, url=started.url)


def test_task_that_sees_one_gpu_uses_it_whatever_its_number():
    assert plan(flags(), False, 1, srun(2, 1)).local_rank == 0


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"},  # a shell of salloc
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # a batch script, srun not used
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # one task of a larger job
        {"SLURM_PROCID": "0"},
    ],
)
def test_process_that_srun_did_not_start_beside_others_is_alone(environment):
    assert plan(flags(), False, 0, environment) == Launch(1)


def test_older_slurms_variables_are_enough():
    older = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}
    assert plan(flags(), False, 0, {**older, "SLURM_NODELIST": "localhost"}).first == 1


def test_tasks_that_are_to_train_alone_say_so():
    assert plan(flags(distributed_world_size=1), False, 0, srun(2, 1)) == Launch(1)


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
def test_first_host_of_slurms_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "settings, cpu, gpus, environment, message",
    [
        ({"distributed_world_size": 4}, False, 2, {}, "--distributed-world-size 4: this machine has 2 GPUs"),
        ({"nprocs_per_node": 4}, False, 2, {}, "--nprocs-per-node 4: this machine has 2 GPUs"),
        (
            {"nprocs_per_node": 2, "distributed_world_size": 4},
            True,
            0,
            {},
            "4 processes need --distributed-init-method",
        ),
        (
            {"distributed_world_size": 4, "distributed_init_method": URL},
            *(
                False,
                0,
                {},
                "--distributed-world-size 4: this machine has 0 GPUs; add --cpu to run on the processor, or ",
            ),
        ),
        ({"nprocs_per_node": 10**7}, True, 0, {}, "--nprocs-per-node 10000000"),
        ({"distributed_world_size": 10**7}, True, 0, {}, "--distributed-world-size 10000000"),
        ({"distributed_world_size": 2, "distributed_rank": 2}, True, 0, {}, "--distributed-rank 2: 2 processes are"),
        ({"distributed_world_size": 2, "distributed_no_spawn": True}, True, 0, {}, "--distributed-no-spawn: needs"),
        ({"distributed_world_size": 3}, True, 0, srun(2, 1), "--distributed-world-size 3: srun started 2 tasks"),
        ({}, True, 0, {**srun(2, 1), "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID=x: the variable must be a whole number"),
        ({}, True, 0, {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_JOB_ID: not set"),
        ({}, True, 0, {**srun(2, 2), "SLURM_STEP_NODELIST": ""}, "SLURM_NODELIST: not set"),
        ({}, True, 0, {"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE=-2: the variable must be a whole number"),
        ({}, True, 0, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "a"}, "LOCAL_RANK=a: the variable"),
        ({}, True, 0, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: the environment says 2 processes"),
        ({}, True, 0, {"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0: the environment says 0 processes"),
        ({}, True, 0, srun(2, 1, rank=2), "SLURM_PROCID=2: the environment says 2 processes"),
        ({}, True, 0, {"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first: the variable must be a whole number"),
    ],
)
def test_contradictions_are_refused_in_one_line(settings, cpu, gpus, environment, message):
    with user_error(message):
        plan(flags(**settings), cpu, gpus, environment)
