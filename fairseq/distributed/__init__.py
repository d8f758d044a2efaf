"""Data-parallel processes: start, collectives, gradient reduction."""

from fairseq.distributed.ddp import DataParallel, GradientReducer
from fairseq.distributed.interruption import Interruption, end_at_signals
from fairseq.distributed.launch import Job, run, run_on_processes
from fairseq.distributed.world import World, device_of
from fairseq.system.deferred import names_of

__all__ = [
    "DataParallel",
    "GradientReducer",
    "Interruption",
    "Job",
    "World",
    "device_of",
    "end_at_signals",
    "run",
    "run_on_processes",
]


__getattr__, _ = names_of(__name__, {"fairseq.distributed.fully_sharded_data_parallel": "fsdp_wrap ModuleProxyWrapper"})
