"""Arguments of kernels in C: which tensors they read, addresses, sizes and numbers of threads."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

TYPES = {torch.float32: 0, torch.bfloat16: 1}
LEAST_WORK = 1 << 15  # elements per thread; fewer take no longer than it takes to start a thread


def is_plain(x: Tensor) -> bool:
    """Whether kernels can read *x*: numbers of a type that they know, at its address."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in TYPES or not x.numel():
        return False
    # Subclasses (fake, distributed and other tensors)
    # have no data at their address, or not all of it.
    return type(x) in (Tensor, nn.Parameter)


def type_of(x: Tensor) -> ctypes.c_long:
    return ctypes.c_long(TYPES[x.dtype])


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors]


def rows_and_columns(x: Tensor) -> tuple[ctypes.c_long, ctypes.c_long]:
    """Rows and columns."""
    return ctypes.c_long(x.numel() // x.size(-1)), ctypes.c_long(x.size(-1))


def trailing(x: Tensor, *switches: bool) -> list[ctypes.c_long]:
    """The last arguments of a kernel: switches, and the number of threads for *x*."""
    return [*(ctypes.c_long(value) for value in switches), threads(x.numel())]


def threads(size: int) -> ctypes.c_long:
    """Threads for so many elements."""
    return ctypes.c_long(max(1, min(torch.get_num_threads(), size // LEAST_WORK)))
