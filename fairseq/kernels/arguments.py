"""Operators of kernels in C, and their calls: addresses of tensors, sizes and numbers of threads as
C's types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in vectors.h
LEAST_WORK = 1 << 15  # elements per thread; fewer take no longer than it takes to start a thread


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the operator *name* on CPUs, which changes its arguments *mutates* in place;
    ``torch.compile`` keeps it in its graph.

    ``torch.library.custom_op`` would import torch's compiler at the first call: two seconds at the
    start of every run.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "cpu", function)
        namespace, own = name.split("::")
        return getattr(getattr(torch.ops, namespace), own).default

    return register


def no_second_derivative(name: str) -> None:
    """Make a second derivative, by the gradient operator *name*, an error: torch would take it for
    zero."""

    def fail(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{name}: no autograd formula; a gradient by kernels has no derivative")

    torch.library.register_autograd(name, fail)


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
