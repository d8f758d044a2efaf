"""Calls of kernels in C: addresses of tensors, sizes and numbers of threads as C's types."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in vectors.h
LEAST_WORK = 1 << 15  # elements per thread; fewer take no longer than it takes to start a thread


def call(kernel: Any, *arguments: Tensor | torch.dtype | float | None) -> None:
    """Call *kernel* with addresses of tensors, ``long`` for integers and types, and ``float``."""
    kernel(*map(_as_c, arguments))


def threads(size: int) -> int:
    """Threads for so many elements."""
    return max(1, min(torch.get_num_threads(), size // LEAST_WORK))


def _as_c(argument: Tensor | torch.dtype | float | None) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    if isinstance(argument, torch.dtype):
        return ctypes.c_long(TYPES[argument])
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_long(argument)
