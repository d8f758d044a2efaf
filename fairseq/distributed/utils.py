"""``fairseq.distributed_utils``: ranks and reductions of plug-ins, over all processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq.system import deferred


# Asked at every call: plug-ins are imported before the rendezvous.
def _several() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: object = None) -> int:
    return dist.get_rank() if _several() else 0


def get_world_size(group: object = None) -> int:
    return dist.get_world_size() if _several() else 1


get_global_rank = get_data_parallel_rank = get_rank
get_global_world_size = get_data_parallel_world_size = get_world_size


# torch.distributed takes None for the group of all processes.
def get_data_parallel_group() -> None:
    """Return None, which stands for all processes."""


get_global_group = get_data_parallel_group


def is_master(args: object = None) -> bool:
    return get_rank() == 0


def all_reduce(tensor: Tensor, group: object = None, op: str = "sum") -> Tensor:
    """Sum (or *op* max) of *tensor* over all processes, in place."""
    if _several():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
    return tensor


def all_gather(tensor: Tensor, group: object = None) -> list[Tensor]:
    if not _several():
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def broadcast(tensor: Tensor, src: int, group: object = None) -> None:
    if _several():
        dist.broadcast(tensor, src)


def all_gather_list(data: object, group: object = None, max_size: int = 16384) -> list[object]:
    if not _several():
        return [data]
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, data)
    return gathered


def call_main(cfg: object, main: Callable[..., object], **options: object) -> None:
    """Call *main*; a command of this package starts as many processes as it needs, and takes flat
    settings.

    Where the script has set up :mod:`logging`, lines of the log go there.
    """
    deferred.plugins().call_main(cfg, main, **options)
