"""Processes of a job: the ranks that this process starts or is, from torchrun's or SLURM's variables or from flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fairseq.config.settings import DistributedConfig
from fairseq.errors import SettingError, UserError
from fairseq.system.limits import check_processes


@dataclass(frozen=True)
class Launch:
    """The part of a job that this process is responsible for."""

    size: int  # processes of the whole job
    first: int = 0  # rank of this process, or of the first process that it starts
    count: int = 0  # processes that it starts; 0 if it is itself rank *first*
    local_rank: int = 0  # index of its GPU, where it starts no others
    # Address of the rendezvous; None for a free port of the loopback, which only one launcher can use.
    url: str | None = None


def plan(cfg: DistributedConfig, cpu: bool, gpus: int, environment: Mapping[str, str]) -> Launch:
    """Return the part of the job that belongs to this process, which sees *gpus* GPUs, 0 with *cpu*.

    Raises:
        UserError: the flags contradict each other, the environment, or the number of GPUs.
    """
    # torchrun sets both; one alone may be left over from something else.
    if "RANK" in environment and "WORLD_SIZE" in environment:
        size = _number(environment, "WORLD_SIZE")
        rank = _number_below(environment, "RANK", size)
        local_rank = _number(environment, "LOCAL_RANK", rank)
        return Launch(size, rank, local_rank=local_rank, url="env://")
    # Flags that name a rendezvous mean processes started by hand, also inside a SLURM job.
    tasks = 1 if cfg.distributed_init_method else _slurm_tasks(environment)
    if tasks > 1 and cfg.distributed_world_size != 1:
        return _from_slurm(cfg, tasks, gpus, environment)
    return _from_flags(cfg, cpu, gpus)


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list of nodes: ``rack[1-2]n[07,09-11],login`` → ``rack1n07``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    return re.sub(r"\[\s*(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    """The tasks that srun started together with this process; 1 where it was not started by srun."""
    if "SLURM_PROCID" not in environment:
        return 1
    # Of this srun: SLURM_NTASKS is the whole job's.
    if "SLURM_STEP_NUM_TASKS" in environment:
        return _number(environment, "SLURM_STEP_NUM_TASKS")
    # The batch script itself: SLURM_NTASKS is what srun would start.
    if environment.get("ENVIRONMENT") == "BATCH":
        return 1
    return _number(environment, "SLURM_NTASKS", 1)


def _from_slurm(cfg: DistributedConfig, tasks: int, gpus: int, environment: Mapping[str, str]) -> Launch:
    rank = _number_below(environment, "SLURM_PROCID", tasks)
    listed = next((environment[n] for n in _NODE_LISTS if n in environment), "")
    counted = next((_number(environment, n) for n in _NODE_COUNTS if n in environment), None)
    nodes = counted or (2 if re.search(r"[,\[]", listed) else 1)
    host = "127.0.0.1" if nodes == 1 else first_host(listed)
    if not host:
        raise UserError("SLURM_NODELIST: not set, though srun started several nodes; give `distributed_init_method`")
    url = f"tcp://{host}:{_slurm_port(cfg, environment)}"
    per_task = 1
    # One task a node: it starts the processes of its GPUs.
    if tasks == counted:
        per_task = cfg.nprocs_per_node or max(gpus, 1)
    size = tasks * per_task
    if cfg.distributed_world_size not in (None, size):
        raise SettingError(
            f"`distributed_world_size` {cfg.distributed_world_size}: srun started {tasks} tasks, which make {size} "
            "processes; leave it out, or give 1 to train in each task alone"
        )
    if per_task > 1:
        return Launch(size, rank * per_task, per_task, url=url)
    local = _number(environment, "SLURM_LOCALID", rank)
    # One GPU: srun bound it to this task.
    return Launch(size, rank, local_rank=0 if gpus == 1 else local, url=url)


def _slurm_port(cfg: DistributedConfig, environment: Mapping[str, str]) -> int:
    """A port that the tasks of one step agree on, and jobs on one node hardly share."""
    if cfg.distributed_port > 0:
        return cfg.distributed_port
    if "SLURM_JOB_ID" not in environment:
        raise UserError("SLURM_JOB_ID: not set, and the tasks' port is derived from it; give `distributed_port`")
    step = environment.get("SLURM_STEP_ID", "0")
    return 20000 + (_number(environment, "SLURM_JOB_ID") + 7919 * (int(step) if step.isdecimal() else 0)) % 10000


def _from_flags(cfg: DistributedConfig, cpu: bool, gpus: int) -> Launch:
    here = cfg.nprocs_per_node or gpus
    size = cfg.distributed_world_size or max(here, 1)
    url = cfg.distributed_init_method
    if cfg.distributed_rank >= size > 1:
        raise SettingError(f"`distributed_rank` {cfg.distributed_rank}: {size} processes are numbered from 0")
    if cfg.distributed_no_spawn and size > 1:
        if not url:
            raise SettingError("`distributed_no_spawn`: needs `distributed_init_method`, the address of the rendezvous")
        return Launch(size, cfg.distributed_rank, local_rank=cfg.local_rank, url=url)
    if size == 1:
        return Launch(1, local_rank=cfg.local_rank)
    if not cpu and (cfg.nprocs_per_node or (0 if url and gpus else size)) > gpus:
        name = f"`nprocs_per_node` {here}" if cfg.nprocs_per_node else f"`distributed_world_size` {size}"
        raise UserError(
            f"{name}: this machine has {gpus} GPUs; add `cpu` to run on the processor, "
            "or `distributed_init_method` to add other machines"
        )
    count = min(here or size, size - cfg.distributed_rank)
    # The number of GPUs bounds nothing here, and each process takes memory.
    if cpu:
        check_processes("`nprocs_per_node`" if cfg.nprocs_per_node else "`distributed_world_size`", count)
    if count < size and not url:
        raise SettingError(
            f"`nprocs_per_node` {here}: {size} processes need `distributed_init_method`, to find the other nodes'"
        )
    if url is None and cfg.distributed_port > 0:
        url = f"tcp://127.0.0.1:{cfg.distributed_port}"
    return Launch(size, cfg.distributed_rank, count, url=url)


def _number(environment: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name}={text}: the variable must be a whole number")
    return int(text)


def _number_below(environment: Mapping[str, str], name: str, count: int) -> int:
    """The number of one of *count* processes: with another one it would wait for a job that has no place for it."""
    number = _number(environment, name)
    if number >= count:
        raise UserError(f"{name}={number}: the environment says {count} processes, which are numbered from 0")
    return number


_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_NODE_COUNTS = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
