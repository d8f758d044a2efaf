"""RMS norm, SwiGLU and rotary positions on CPUs,
in one pass over memory each: kernels in C (``layers.c``).

They are compiled at first use; without them torch's operators give the same numbers to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.kernels import build
from fairseq.kernels.arguments import is_plain, pointers, rows_and_columns, threads, trailing, type_of

_SOURCE = Path(__file__).with_name("layers.c")
_ROWS = 32  # whose gradients of the gain are one sum, as in layers.c


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor | None:
    """*x* [..., C] divided by its root mean square,
    times *gain* [C], float32; None if no kernel computes it."""
    regular = gain.dtype == torch.float32 and gain.shape == x.shape[-1:] and is_plain(gain)
    return _RMSNorm.apply(x.contiguous(), gain.contiguous(), eps) if regular and _computes(x) else None


def silu_product(x: Tensor, other: Tensor) -> Tensor | None:
    """silu(*x*) times *other* of its shape and type; None if no kernel computes it."""
    regular = (other.shape, other.dtype) == (x.shape, x.dtype) and is_plain(other)
    return _SiLUProduct.apply(x.contiguous(), other.contiguous()) if regular and _computes(x) else None


def rotated(x: Tensor, table: Tensor) -> Tensor | None:
    """*x* [B, H, T, D], its first R channels turned as *table*
    [T, 2, R/2] says; None if no kernel computes it.

    Of the result, time comes before heads in memory.
    """
    regular = x.dim() == 4 and table.dtype == torch.float32 and table.shape[:2] == (x.size(2), 2)
    if not regular or 2 * table.size(2) > x.size(3) or not is_plain(table) or not _computes(x):
        return None
    return _Rotation.apply(x, table.contiguous(), 1.0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        y, scales = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
        tensors = pointers(x, gain, y, scales)
        _compiled().rms_norm(type_of(x), *tensors, ctypes.c_float(eps), *rows_and_columns(x), *trailing(x))
        ctx.eps = eps
        ctx.save_for_backward(x, gain, scales)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_derivable(lambda x, gain: torch_rms_norm(x, gain, ctx.eps), ctx, (x, gain), grads[0]), None
        grad, of_x = grads[0].contiguous(), torch.empty_like(x)
        rows, columns = x.numel() // x.size(-1), x.size(-1)
        sums = x.new_empty(-(-rows // _ROWS), columns, dtype=torch.float32)
        _compiled().rms_norm_gradient(
            type_of(x), *pointers(grad, x, gain, scales, of_x, sums), *rows_and_columns(x), *trailing(x)
        )
        return of_x, sums.sum(0) if ctx.needs_input_grad[1] else None, None


class _SiLUProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _compiled().gate(type_of(x), *pointers(x, other, y), ctypes.c_long(x.numel()), threads(x.numel()))
        ctx.save_for_backward(x, other)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, other = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _derivable(lambda x, other: F.silu(x) * other, ctx, (x, other), grads[0])
        grad, results = grads[0].contiguous(), (torch.empty_like(x), torch.empty_like(x))
        tensors = pointers(grad, x, other, *results)
        _compiled().gate_gradient(type_of(x), *tensors, ctypes.c_long(x.numel()), threads(x.numel()))
        return results


class _Rotation(torch.autograd.Function):
    """Rotation, or back where *direction* is −1, which is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, direction: float) -> Tensor:
        x = x.transpose(1, 2).contiguous()  # (B, T, H, D)
        y, sizes = torch.empty_like(x), (*x.shape, table.size(2))
        numbers = (ctypes.c_long(size) for size in sizes)
        _compiled().rotate(type_of(x), *pointers(x, table, y), ctypes.c_float(direction), *numbers, threads(x.numel()))
        ctx.direction = direction
        ctx.save_for_backward(table)
        return y.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Through autograd again, so that the gradient has a derivative.
        return _Rotation.apply(grads[0], *ctx.saved_tensors, -ctx.direction), None, None


def torch_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The norm by torch's operators, in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], gain, eps).to(x.dtype)


def _derivable(
    function: Callable[..., Tensor], ctx: Any, inputs: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of *function* of *inputs* by torch's operators, which have derivatives."""
    read = [x for x, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
    gradients = iter(torch.autograd.grad(function(*inputs), read, grad, create_graph=True))
    return tuple(next(gradients) if needed else None for needed in ctx.needs_input_grad[: len(inputs)])


def _computes(x: Tensor) -> bool:
    return is_plain(x) and _compiled() is not None


def _compiled() -> Any:
    return build.library("layers", _SOURCE)
