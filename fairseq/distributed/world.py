"""Rank, number of processes, and collectives; the device of a process, and its precision."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq.config.settings import CommonConfig
from fairseq.errors import UserError
from fairseq.modules import devices, precision

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILES = timedelta(days=1)
"""How long processes wait for one that reads or writes files: no disk takes longer."""


@dataclass(frozen=True)
class World:
    """Rank of this process, number of processes, device, and the collectives between them."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    # Seconds after which a collective ends whose other processes hang; None: PyTorch's.
    timeout: float | None = None

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes logs and checkpoints."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Sum *value* over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each of *flags*, as many on every process, whether any process sets it."""
        if self.size == 1:
            return list(flags)
        # Between the hosts: no device is waited for.
        counts = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(counts, group=self._host_group)
        return [count > 0 for count in counts.tolist()]

    def gather(self, value: T, everywhere: bool = False) -> list[T]:
        """Return the *value* (plain Python and CPU tensors) of every process in rank order on rank
        0, or *everywhere*; [] on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size  # filled in place
        if everywhere:
            dist.all_gather_object(values, value)
            return values
        dist.gather_object(value, values if self.is_first else None)
        return values if self.is_first else []

    def stack_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows of every process's *tensors*, in rank order, on the host of the first; else [].

        Process r has tensors [R_r, …], of the same further dimensions and types as the others, or
        none. Each is received into its place in the result, [sum of R_r, …].
        """
        if self.size == 1:
            return [tensor.detach().cpu() for tensor in tensors]
        group = self._host_group
        headers = self.gather([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        if not self.is_first:
            for tensor in tensors:
                dist.send(tensor.detach().cpu().contiguous(), 0, group=group)
            return []
        counts = [header[0][0][0] if header else 0 for header in headers]
        known: list[Any] = next((header for header in headers if header), [])
        stacked = [torch.empty((sum(counts), *shape[1:]), dtype=dtype) for shape, dtype in known]
        pieces = list(zip(*(tensor.split(counts) for tensor in stacked), strict=True))
        for piece, tensor in zip(pieces[0] if tensors else (), tensors, strict=True):
            piece.copy_(tensor.detach())
        for rank, header in enumerate(headers[1:], start=1):
            for piece in pieces[rank] if header else ():
                dist.recv(piece, rank, group=group)
        return stacked

    def gather_rows(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The rows of every process's *tensors*, in rank order, on every process.

        The tensors of process r have R_r rows each: [R_r, …] → [sum of R_r, …].
        """
        if self.size == 1:
            return tensors
        # Between the hosts, which know the numbers of rows: none is read from a device.
        count = torch.tensor([tensors[0].size(0)])
        counts = [torch.empty_like(count) for _ in range(self.size)]
        dist.all_gather(counts, count, group=self._host_group)
        return tuple(self._gather_padded(tensor, torch.cat(counts).tolist()) for tensor in tensors)

    @functools.cached_property
    def _host_group(self) -> dist.ProcessGroup | None:
        """The processes as a group that exchanges host memory; None: the default one does."""
        # NCCL would also open a communicator for each pair of processes that sends and receives.
        if dist.get_backend() != "nccl":
            return None
        # A new group has PyTorch's timeout, not the default group's.
        limit = None if self.timeout is None else timedelta(seconds=self.timeout)
        return dist.new_group(backend="gloo", timeout=limit)

    @functools.cached_property
    def _file_group(self) -> dist.ProcessGroup:
        """The processes as a group that waits while one of them reads or writes files."""
        return dist.new_group(backend="gloo", timeout=FILES)

    def _gather_padded(self, rows: Tensor, counts: list[int]) -> Tensor:
        if max(counts) == 0:
            return rows
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: rows.size(0)] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def share(self, value: T) -> T:
        """Return the *value* of rank 0 on every process, however long rank 0 reads files for it."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self._file_group)
        return box[0]

    def barrier(self) -> None:
        """Wait for every process, however long one reads or writes files."""
        if self.size > 1:
            dist.barrier(group=self._file_group)


def device_of(common: CommonConfig, local_rank: int = 0) -> torch.device:
    """Select GPU *local_rank*, or the CPU with --cpu or without any GPU, float32's precision, and
    the algorithms of ``--deterministic``.

    Raises:
        UserError: there is no GPU of that number.
    """
    # "highest" keeps float32 exact; the default may change with PyTorch and the environment.
    torch.set_float32_matmul_precision("high" if common.tf32 else "highest")
    if common.deterministic:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if common.cpu or devices.accelerator() is None:
        if (common.fp16 or common.memory_efficient_fp16) and not precision.has_float16_arithmetic():
            flag = "`fp16`" if common.fp16 else "`memory_efficient_fp16`"
            logger.warning(f"{flag}: this CPU has no float16 arithmetic, so it is far slower than float32; use `bf16`")
        return torch.device("cpu")
    if local_rank >= (count := devices.count()):
        raise UserError(f"`device_id` {local_rank}: there are {count} GPUs, numbered from 0")
    return devices.select(local_rank)
