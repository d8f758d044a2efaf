"""RMS norm and rotary positions on CPUs, ``fairseq::rms_norm`` and ``fairseq::rotated``: in one
pass over memory each (``layers.c``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.kernels import build
from fairseq.kernels.arguments import call, no_second_derivative, operator, threads

_SOURCE = Path(__file__).with_name("layers.c")
_ROWS = 32  # whose gradients of the gain are one sum, as in layers.c


def compiled() -> Any:
    """The compiled kernels; None if there are none."""
    return build.library("layers", _SOURCE)


# ---- RMS norm ----


@operator("fairseq::rms_norm")
def rms_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """*x* [..., C] times *gain* [C], float32, divided by its root mean square; and 1 divided by
    that [...], float32."""
    x, gain = x.contiguous(), gain.contiguous()
    y, scales = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    call(compiled().rms_norm, x.dtype, x, gain, y, scales, eps, *_rows_and_columns(x), threads(x.numel()))
    return y, scales


@torch.library.register_fake("fairseq::rms_norm")
def _(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@operator("fairseq::rms_norm_gradient")
def rms_norm_gradient(grad: Tensor, x: Tensor, gain: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of *x* and *gain*."""
    grad, x, gain = grad.contiguous(), x.contiguous(), gain.contiguous()
    rows, columns = _rows_and_columns(x)
    of_x, sums = torch.empty_like(x), x.new_empty(-(-rows // _ROWS), columns, dtype=torch.float32)
    tensors = grad, x, gain, scales, of_x, sums
    call(compiled().rms_norm_gradient, x.dtype, *tensors, rows, columns, threads(x.numel()))
    return of_x, sums.sum(0)


@torch.library.register_fake("fairseq::rms_norm_gradient")
def _(grad: Tensor, x: Tensor, gain: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return _like(x), _like(gain)


no_second_derivative("fairseq::rms_norm_gradient")


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gain, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gain, output[1])


def _norm_gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return (None,) * 3 if grad is None else (*rms_norm_gradient(grad, *ctx.saved_tensors), None)


torch.library.register_autograd("fairseq::rms_norm", _norm_gradients, setup_context=_save_norm)


# ---- rotary positions ----


@operator("fairseq::rotated")
def rotated(x: Tensor, table: Tensor, direction: float) -> Tensor:
    """*x* [B, H, T, D], its first R channels turned as *table* [T, 2, R/2] says, or back where
    *direction* is −1. Of the result, time comes before heads in memory."""
    rows, heads, times, dim = x.shape
    half = table.size(2)
    # The kernel reads the table at its address.
    if table.shape != (times, 2, half) or table.dtype != torch.float32 or 2 * half > dim:
        raise ValueError(f"table {list(table.shape)} of {table.dtype}: does not fit {times} rows of {dim} channels")
    x, table = x.transpose(1, 2).contiguous(), table.contiguous()  # (B, T, H, D)
    y = torch.empty_like(x)
    sizes = rows, times, heads, dim, half
    call(compiled().rotate, x.dtype, x, table, y, direction, *sizes, threads(x.numel()))
    return y.transpose(1, 2)


@torch.library.register_fake("fairseq::rotated")
def _(x: Tensor, table: Tensor, direction: float) -> Tensor:
    return _like(x.transpose(1, 2)).transpose(1, 2)


def _save_table(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, table, ctx.direction = inputs
    ctx.save_for_backward(table)


def _turn_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return rotated(grad, *ctx.saved_tensors, -ctx.direction), None, None


torch.library.register_autograd("fairseq::rotated", _turn_back, setup_context=_save_table)


def _rows_and_columns(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.size(-1), x.size(-1)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
