"""Fully sharded data parallelism: each process holds a part of all parameters and their state.

Rajbhandari et al. 2020, "ZeRO", stage 3; in PyTorch ``fully_shard`` (FSDP2), which gathers a
layer's parameters for as long as it computes. It is applied to a model from outside, here alone.

Each layer is a group, gathered for its computation in the precision of matrix products. Embeddings
that share no parameter are a group in float32, free between the first layer and the end of the
backward pass. All other parameters are the root's group, gathered once in float32: the output layer
comes last, is needed again first, and criterions read its parameters without a call of it.

The optimizer, the average and loss scaling see the local parts as plain tensors; what they do is
elementwise, but for the norm of the gradient, which is reduced. LAMB and Adafactor need whole
parameters and are refused. Initial values are drawn on rank 0's host, so that a seed gives the same
model for any number of processes, and sent one group at a time.
"""

from __future__ import annotations

import itertools
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fairseq.config.settings import DistributedConfig
from fairseq.distributed.ddp import DataParallel
from fairseq.distributed.tensor_part import TensorPart, rows_of
from fairseq.distributed.world import World
from fairseq.errors import UserError
from fairseq.modules import devices
from fairseq.modules.ngram_notes import is_sparse

BACKEND = "fully_sharded"


class ShardedReducer(DataParallel):
    """Data-parallel execution of a module whose parameters are sharded over processes.

    The parameters of each of *layers* are gathered in *dtype* (None: their own), those of each of
    *embeddings* in their own. Rank 0's initial values count; the *module* of other ranks may be on
    the meta device.

    Raises:
        UserError: --shard-group-size does not fit, or PyTorch is too old.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[nn.Module],
        embeddings: Sequence[nn.Module],
        world: World,
        cfg: DistributedConfig,
        dtype: torch.dtype | None,
    ) -> None:
        from torch.distributed import fsdp

        if not hasattr(getattr(fsdp, "FSDPModule", None), "set_reduce_scatter_unused_params"):
            raise UserError(f"`ddp_backend` {BACKEND}: needs a newer PyTorch than {torch.__version__}, such as 2.13")
        if any(map(is_sparse, module.modules())):
            raise UserError(f"`ngram_notes`, `word_notes`: not with `ddp_backend` {BACKEND}; give 0")
        # No module's output is modified in place, which the warning is about.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        self.shard = shard_of(cfg, world)
        mesh = _mesh(world, self.shard[1])
        self.module = module
        self.world = world
        self.group = mesh.get_group("shard")
        offload = fsdp.OffloadPolicy()
        if cfg.cpu_offload:
            offload = fsdp.CPUOffloadPolicy(pin_memory=devices.is_accelerator(world.device))
        reduced = dtype and torch.float32
        low = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
        policies = [low] * len(layers) + [fsdp.MixedPrecisionPolicy()] * len(embeddings)
        for group, policy in zip((*layers, *embeddings), policies, strict=True):
            _move(group, world.device)
            fsdp.fully_shard(group, mesh=mesh, mp_policy=policy, offload_policy=offload)
        _move(module, world.device)
        root: Any = fsdp.fully_shard(module, mesh=mesh, offload_policy=offload)
        root.set_force_sum_reduction_for_comms(True)  # an older gloo has no mean
        # A rank without a batch does not use all of them: zeros take part for it.
        root.set_reduce_scatter_unused_params(True)
        self.root = root
        self.sharded: dict[str, Any] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parts = {name: nn.Parameter(p.to_local().detach()) for name, p in self.sharded.items()}
        self._full = {id(part): self.sharded[name] for name, part in self.parts.items()}
        # Names of the parameters that a backward pass on this process gave a gradient.
        self.used: set[str] = set()
        for group in (*layers, *embeddings, module):
            self._record_use(group)
        # Checkpoints hold full values or local shards, where PyTorch expects its own tensors.
        for loaded in module.children():
            loaded.register_load_state_dict_pre_hook(self._cut_parameters)

    def accumulate(self, last: bool) -> AbstractContextManager[object]:
        # Within a group every backward pass is reduced, so that parts are accumulated and never the
        # whole gradient; between groups, where the network is slow, only the last one of an update.
        self.root.set_requires_all_reduce(last)
        return nullcontext()

    def reduce(self) -> None:
        self.reset()
        used_by_any = self.world.any([name in self.used for name in self.sharded])
        self.used.clear()
        for (name, parameter), is_used in zip(self.sharded.items(), used_by_any, strict=True):
            if parameter.grad is not None:
                # Zeros that no process computed are none: decay and momentum would move it.
                self.parts[name].grad = parameter.grad.to_local() if is_used else None
                parameter.grad = None

    def total_norm(self, norm: Tensor) -> Tensor:
        squares = norm.square()
        # Within the group: the groups hold the same shards.
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def reset(self) -> None:
        self.root.reshard()
        for name, parameter in self.sharded.items():
            # The first forward pass may have moved it.
            self.parts[name].data = parameter.to_local().detach()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.parts.items()

    def full_parameter(self, part: nn.Parameter) -> nn.Parameter:
        return self._full[id(part)]

    def local_shard(self, part: nn.Parameter, value: Any) -> Any:
        is_full = isinstance(value, Tensor | TensorPart) and value.shape == self._full[id(part)].shape
        return self._rows(value) if is_full else value

    def full(self, part: nn.Parameter, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return self._part(value, self._full[id(part)].shape)

    def consolidated(self, parameters: Mapping[str, Tensor]) -> dict[str, object]:
        # A tied tensor stays one.
        once: dict[int, Any] = {id(value): value for value in parameters.values()}
        cut = {key: self._part(v.to_local(), v.shape) if _is_sharded(v) else v for key, v in once.items()}
        return {name: cut[id(value)] for name, value in parameters.items()}

    def _record_use(self, group: Any) -> None:
        """Let :attr:`used` have the names of what each backward pass uses of *group*."""
        group.unshard()  # PyTorch keeps these tensors, and fills them for each computation
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and not _is_sharded(parameter):
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.used.add(name))
        group.reshard()

    def _part(self, local: Tensor, shape: torch.Size) -> TensorPart:
        return TensorPart(local.detach(), rows_of(shape[0], *self.shard)[0], shape)

    def _rows(self, value: Tensor | TensorPart) -> Tensor:
        """This process's rows of *value*."""
        first, end = rows_of(value.shape[0], *self.shard)
        return value.local if isinstance(value, TensorPart) else value[first:end]

    def _cut_parameters(self, module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
        """Replace whole tensors in *state*, which *module* is about to load, by local parts."""
        from torch.distributed.tensor import DTensor

        for name, target in module.state_dict(prefix=prefix).items():
            value = state.get(name)
            if _is_sharded(target) and isinstance(value, Tensor | TensorPart) and value.shape == target.shape:
                local = torch.empty_like(target.to_local()).copy_(self._rows(value))
                layout = target.device_mesh, target.placements
                state[name] = DTensor.from_local(local, *layout, shape=target.shape, stride=target.stride())


def build_device(cfg: DistributedConfig, world: World) -> AbstractContextManager[object]:
    """Return the context to build a model in: ranks above 0 of a sharded job need no memory yet."""
    if is_sharded(cfg, world) and not world.is_first:
        return torch.device("meta")
    return nullcontext()


def is_sharded(cfg: DistributedConfig, world: World) -> bool:
    """Return whether the processes of *world* hold parts of the parameters."""
    return cfg.ddp_backend == BACKEND and world.size > 1


def shard_of(cfg: DistributedConfig, world: World) -> tuple[int, int]:
    """Return (i, n): this process holds part i of n of each parameter; a size that does not fit is
    a UserError."""
    # Within a machine: layers are gathered in every pass, which a network would slow down.
    size = cfg.shard_group_size or _processes_of_a_node(world)
    if world.size % size:
        raise UserError(f"`shard_group_size` {size}: must divide the number of processes, {world.size}")
    return world.rank % size, size


def _mesh(world: World, size: int) -> dist.DeviceMesh:
    """The processes as a mesh: ``shard``; for groups of *size*, ``replicate`` × ``shard``."""
    if size == world.size:
        return dist.init_device_mesh(world.device.type, (size,), mesh_dim_names=("shard",))
    return dist.init_device_mesh(world.device.type, (world.size // size, size), mesh_dim_names=("replicate", "shard"))


def _processes_of_a_node(world: World) -> int:
    """Processes of each machine, where all have as many; else all of *world*."""
    hosts = world.gather(socket.gethostname(), everywhere=True)
    counts = {len(list(members)) for _, members in itertools.groupby(hosts)}
    size = counts.pop()
    return size if not counts and size > 1 else world.size


def _move(module: nn.Module, device: torch.device) -> None:
    """Put the parameters and buffers of *module* on *device*, with rank 0's values."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not _is_sharded(tensor):
            values = torch.empty_like(tensor, device=device)
            if not tensor.is_meta:
                values.copy_(tensor.detach())
            dist.broadcast(values, 0)
            # A new tensor, because the broadcast may not have let go of its own yet.
            new = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values.detach()
            # In place, so that tied ones stay tied.
            torch.utils.swap_tensors(tensor, new)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")
