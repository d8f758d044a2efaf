"""Gradient reduction over data-parallel processes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq.distributed.world import World
from fairseq.modules import devices
from fairseq.modules.ngram_notes import is_sparse


class DataParallel:
    """Execution of *module* on the data of several processes, whose gradients are averaged."""

    module: nn.Module

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a forward and backward pass, the *last* of an update or not."""
        raise NotImplementedError

    def reduce(self) -> None:
        """Average the gradients that the last backward pass has not averaged yet."""
        raise NotImplementedError

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trained parameters, as the optimizer changes them: this process's parts."""
        raise NotImplementedError

    def full_parameter(self, part: nn.Parameter) -> nn.Parameter:
        """The module's parameter that *part*, one of :meth:`named_parameters`, is a part of."""
        return part

    def local_shard(self, part: nn.Parameter, value: object) -> Any:
        """This process's part of *value*, if it has the shape of the module's parameter."""
        return value

    def full(self, part: nn.Parameter, value: object) -> Any:
        """*value*, if it has the shape of *part*, as a checkpoint of all processes stores it."""
        return value

    def consolidated(self, parameters: Mapping[str, Tensor]) -> dict[str, object]:
        """*parameters* of the module's state dict, as a checkpoint of all processes stores them."""
        return dict(parameters)

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients from the *norm* of this process's parts."""
        return norm

    def reset(self) -> None:
        """Let the next forward pass see parameters that something else than an update changed."""


class GradientReducer(DataParallel):
    """Data-parallel execution of a module that every process holds whole.

    With the *backend* ``c10d`` or ``pytorch_ddp`` torch's DistributedDataParallel overlaps the
    reduction with the backward pass; with another one it follows, in buckets.
    """

    def __init__(
        self, module: nn.Module, world: World, backend: str, bucket_cap_mb: int, find_unused_parameters: bool
    ) -> None:
        self.world = world
        self.overlapped = world.size > 1 and backend in ("c10d", "pytorch_ddp")
        self.parameters_by_name = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        # Tables of which an update reads and writes single rows.
        tables = {f"{name}.weight": m.weight for name, m in module.named_modules() if is_sparse(m)}
        self.tables = [table for table in tables.values() if table.requires_grad]
        self.bucket = bucket_cap_mb << 20
        self.module = module
        if self.overlapped:
            replicate = nn.parallel.DistributedDataParallel
            if tables:  # NCCL reduces no sparse gradients
                replicate._set_params_and_buffers_to_ignore_for_model(module, list(tables))
            # The name of `broadcast_buffers` since torch 2.13.
            is_new = "forward_sync_buffers" in inspect.signature(replicate).parameters
            no_buffers: dict[str, Any] = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
            self.module = replicate(
                module,
                device_ids=[world.device] if devices.is_accelerator(world.device) else None,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters,
                # No copies to and from the buckets, and no second memory for them.
                gradient_as_bucket_view=True,
                **no_buffers,
            )
        elif world.size > 1:
            # DistributedDataParallel does the same when it is made.
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0)

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        if self.overlapped and not last:
            return self.module.no_sync()  # type: ignore[operator]
        return nullcontext()

    def reduce(self) -> None:
        for table in self.tables:
            self._average_rows(table)
        if self.world.size == 1 or self.overlapped:
            return
        own = {id(table) for table in self.tables}
        parameters = [parameter for _, parameter in self.parameters_by_name if id(parameter) not in own]
        used = self.world.any([parameter.grad is not None for parameter in parameters])
        bucket: list[Tensor] = []
        size = 0
        for parameter in itertools.compress(parameters, used):
            # Used by another process only. What no process used stays None: decay and momentum
            # would move it.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            bucket.append(parameter.grad)
            size += parameter.grad.nbytes
            if size >= self.bucket:
                self._average(bucket)
                bucket, size = [], 0
        if bucket:
            self._average(bucket)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.parameters_by_name

    def _average_rows(self, table: nn.Parameter) -> None:
        """Add up the gradients of each row: those of several batches, and of all processes."""
        gradient = None if table.grad is None else table.grad.coalesce()
        if self.world.size > 1:
            rows, values = torch.empty(0, dtype=torch.long, device=table.device), table.detach()[:0]
            if gradient is not None:
                rows, values = gradient.indices()[0], gradient.values()
            rows, values = self.world.gather_rows(rows, values)
            values = values / self.world.size
            summed = torch.sparse_coo_tensor(rows[None], values, table.shape, check_invariants=False).coalesce()
            gradient = summed if len(rows) else None
        table.grad = gradient

    def _average(self, gradients: list[Tensor]) -> None:
        # One message for many tensors: small ones cost latency, not bandwidth.
        flat = torch.cat([g.reshape(-1) for g in gradients])
        # A sum, then a division: gloo has no mean.
        dist.all_reduce(flat)
        flat.div_(self.world.size)
        for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))
