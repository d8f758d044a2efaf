"""Data-parallel processes: launch, rendezvous, heartbeats, gradient reduction."""

from fairseq.distributed.ddp import GradientReducer
from fairseq.distributed.interruption import Interruption
from fairseq.distributed.launch import Job, device_of, run
from fairseq.distributed.world import World

__all__ = ["GradientReducer", "Interruption", "Job", "World", "device_of", "run"]
