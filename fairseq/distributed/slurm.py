"""Tasks that srun started together: each is a rank, or starts the ranks of its node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fairseq.config.settings import DistributedConfig
from fairseq.errors import SettingError


@dataclass(frozen=True)
class Task:
    """Number *rank* of *count* tasks, which starts *processes* ranks; 0: it is a rank itself."""

    rank: int
    count: int
    processes: int
    local_rank: int
    host: str  # of the first task
    port: int

    @property
    def variables(self) -> dict[str, str]:
        """The variables that torchrun would set for this task as a rank."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.count, "LOCAL_RANK": self.local_rank, "MASTER_PORT": self.port}
        return {"MASTER_ADDR": self.host, **{name: str(value) for name, value in numbers.items()}}


def task_of(cfg: DistributedConfig, gpus: int, environment: Mapping[str, str]) -> Task | None:
    """Return the task of this process, which sees *gpus* GPUs; None if it trains alone.

    Raises:
        SettingError: *cfg* asks for another number of processes.
    """
    count = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if count == 1 or cfg.distributed_world_size == 1:
        return None
    rank, nodes, job = (int(environment[f"SLURM_{name}"]) for name in ("PROCID", "STEP_NUM_NODES", "JOB_ID"))
    processes = (cfg.nprocs_per_node or max(gpus, 1)) if count == nodes else 0
    if cfg.distributed_world_size not in (None, size := count * max(processes, 1)):
        raise SettingError(
            f"`distributed_world_size` {cfg.distributed_world_size}: srun started {count} tasks, which make {size} "
            "processes; leave it out, or give 1 to train in each task alone"
        )
    # One GPU: srun bound it to this task.
    local_rank = 0 if gpus == 1 else int(environment["SLURM_LOCALID"])
    host = "127.0.0.1" if nodes == 1 else first_host(environment["SLURM_STEP_NODELIST"])
    # The tasks of one step agree on it, and jobs on one node hardly share it.
    port = 20000 + (job + 7919 * int(environment["SLURM_STEP_ID"])) % 10000
    return Task(rank, count, processes, local_rank, host, cfg.distributed_port if cfg.distributed_port > 0 else port)


def first_host(nodes: str) -> str:
    """Return the first host of a list of nodes: ``rack[1-2]n[07,09-11],login`` → ``rack1n07``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    return re.sub(r"\[\s*(\w+)[^\]]*\]", r"\1", first[0]) if first else ""
