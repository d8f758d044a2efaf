"""The kernels that operators launch on a GPU: their operations, and the bytes they read and write,
from shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks import fake_gpu

PARTS = ("matmul", "attention", "layers", "loss", "optimizer")
OF_PEAK, OF_BANDWIDTH, SHORTEST = 0.7, 0.8, 2.5e-6

_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
_NO_KERNEL |= {"_unsafe_view", "_reshape_alias", "set_", "resize_", "device", "_local_scalar_dense"}
_NOT_READ = {"fill_", "zero_", "copy_", "uniform_", "normal_", "bernoulli_"}  # their first argument
_ROWS = {"embedding", "index_select", "gather", "index"}
_ADDED_ROWS = {"scatter_add_", "scatter_add", "index_add_", "index_add", "index_put_", "_index_put_impl_"}


@dataclass(frozen=True)
class Kernel:
    """One launch.

    Attributes:
        name: the operator.
        part: one of :data:`PARTS`.
        flops, bytes: what it computes, and what it reads and writes.
    """

    name: str
    part: str
    flops: float
    bytes: float

    def seconds(self, flops: float, bandwidth: float) -> float:
        """The predicted time at a peak of *flops* and a *bandwidth* in bytes per second."""
        return max(self.flops / (OF_PEAK * flops), self.bytes / (OF_BANDWIDTH * bandwidth), SHORTEST)


class Launches(TorchDispatchMode):
    """The kernels of what runs inside, the part they belong to, and how often the host waits for
    the device.

    Attributes:
        records: whether operators are recorded.
    """

    def __init__(self, device: str = fake_gpu.NAME) -> None:
        super().__init__()
        self.device = device
        self.part = "layers"
        self.records = True
        self.kernels: list[Kernel] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense" and args[0].device.type == self.device:
            self.waits += 1
        out = func(*args, **kwargs)
        if not self.records:
            return out
        tensors = tensors_of([*args, *kwargs.values(), out])
        on_gpu = [tensor.device.type == self.device for tensor in tensors]
        copies = name in ("_to_copy", "copy_") and not all(on_gpu)  # by the copy engine
        if any(on_gpu) and not copies and name not in _NO_KERNEL and not func.is_view:
            part = part_of(name, func)
            self.kernels += [Kernel(name, part or self.part, *cost) for cost in costs(name, func, args, kwargs, out)]
        return out


def part_of(name: str, func: Any) -> str | None:
    if "attention" in name:
        return "attention"
    return "matmul" if func.overloadpacket in flop_registry else None


def costs(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[float, float]]:
    """Operations and bytes of each kernel of an operator; CUDA's operators are one kernel, but for
    those named here."""
    read, written = _traffic(name, func, args, kwargs, out)
    flops = 0.0
    if func.overloadpacket in flop_registry:
        flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out) * _visible(name, func, args, kwargs)
    first = size_of(args[0]) if args and isinstance(args[0], Tensor) else 0.0
    if name == "logsumexp":  # maximum, difference, exponential, sum; then the logarithm and the maximum again
        yield from ((0.0, factor * first) for factor in (1, 2, 2, 1))
        yield from ((0.0, 3 * written) for _ in range(2))
    elif name == "native_layer_norm_backward":  # for the input, then for gain and bias
        yield 0.0, read + size_of(out[0])
        yield 0.0, read
    elif name == "embedding_dense_backward":  # zeros, a sort of the indices in some six passes, sums of rows
        yield 0.0, written
        yield from ((0.0, 4 * size_of(args[1])) for _ in range(6))
        yield 0.0, 2 * first
    elif name in _ROWS:
        yield 0.0, 2 * written
    elif name in _ADDED_ROWS:
        yield 0.0, 3 * sum(size_of(x) for x in tensors_of(args[1:]))
    else:
        yield flops, read + written


def _traffic(name: str, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    """Bytes that are read and written."""
    skip_first = name in _NOT_READ or name.startswith("new_") or name.endswith("_like") or kwargs.get("beta") == 0
    read = written = 0.0
    for number, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if argument.kwarg_only or number >= len(args) else args[number]
        size = sum(map(size_of, tensors_of(value)))
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("_fused_") and argument.name == "grads":
            changed = kwargs.get("grad_scale") is not None
        written += size if changed else 0
        read += 0 if argument.is_out or (number == 0 and skip_first) else size
    fresh = [value for value, r in zip(_listed(out), func._schema.returns, strict=False) if r.alias_info is None]
    return read, written + sum(map(size_of, tensors_of(fresh)))


def _visible(name: str, func: Any, args: Any, kwargs: Any) -> float:
    """The share of the scores that causal attention computes; the last query stands at the last
    key."""
    named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if "attention" not in name or not named.get("is_causal"):
        return 1.0
    queries, keys = named["query"].size(2), named["key"].size(2)
    return (keys - queries + (queries + 1) / 2) / keys


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return [value] if isinstance(value, Tensor) else []


def size_of(tensor: Tensor) -> float:
    """Bytes of *tensor* in memory; what is broadcast counts once."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return float(np.prod([n for n, stride in shape if stride] or [min(tensor.numel(), 1)])) * tensor.element_size()
