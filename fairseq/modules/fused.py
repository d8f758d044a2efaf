"""What training computes between matrix products on CPUs, in one pass over memory each: kernels in C (``fused.c``).

They are compiled at first use. Where :func:`kernels` returns None, torch's operators give the same numbers to rounding.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor, nn

from fairseq.modules.native import library

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_LEAST_WORK = 1 << 15  # elements per thread; fewer take no longer than it takes to start a thread


def kernels(*tensors: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels; None if there are none, or none for *tensors*, which have one type."""
    first = tensors[0]
    if torch.compiler.is_compiling() or first.device.type != "cpu" or first.dtype not in _TYPES or not first.numel():
        return None
    # Subclasses (fake, distributed and other tensors) have no data at their address, or not all of it.
    if any(type(x) not in (Tensor, nn.Parameter) or x.dtype != first.dtype for x in tensors):
        return None
    return library("training", Path(__file__).with_name("fused.c"))


def cross_entropy(logits: Tensor, target: Tensor, gradient: bool) -> Tensor | None:
    """−log softmax(logits [n, V])[target [n]]: [n], float64; None if no kernel computes it.

    With *gradient* the logits are overwritten with the gradient of the losses' sum.

    Raises:
        IndexError: a target is not in 0 … V − 1.
    """
    compiled = kernels(logits) if logits.is_contiguous() else None
    if compiled is None:
        return None
    low, high = torch.aminmax(target)
    if low < 0 or high >= logits.size(1):
        raise IndexError(f"target {int(low if low < 0 else high)} is out of range for {logits.size(1)} words")
    target = target.contiguous()
    losses = logits.new_empty(target.shape, dtype=torch.float64)
    compiled.cross_entropy(_type(logits), *_pointers(logits, target, losses), *_shape(logits), *_last(logits, gradient))
    return losses


def add_column_sums_(sums: Tensor, x: Tensor) -> None:
    """Add the sums of *x* [n, V] over its rows to *sums* [V], float32."""
    compiled = kernels(x) if x.is_contiguous() else None
    if compiled is None:
        sums.add_(x.sum(0, dtype=torch.float32))
    else:
        compiled.add_column_sums(_type(x), *_pointers(x, sums), *_shape(x), *_last(x))


def _type(x: Tensor) -> ctypes.c_long:
    return ctypes.c_long(_TYPES[x.dtype])


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors]


def _shape(x: Tensor) -> tuple[ctypes.c_long, ctypes.c_long]:
    """Rows and columns."""
    return ctypes.c_long(x.numel() // x.size(-1)), ctypes.c_long(x.size(-1))


def _last(x: Tensor, *switches: bool) -> list[ctypes.c_long]:
    """The last arguments of a kernel: switches, and the number of threads for *x*."""
    threads = max(1, min(torch.get_num_threads(), x.numel() // _LEAST_WORK))
    return [ctypes.c_long(value) for value in (*switches, threads)]
