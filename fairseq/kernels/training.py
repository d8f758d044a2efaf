"""What training computes between matrix products on CPUs,
in one pass over memory each: kernels in C (``training.c``).

They are compiled at first use; without them torch's operators give the same numbers to rounding,
and the same masks. On GPUs torch's kernels take fewer passes for dropout after a ReLU, and for the
residual that dropout is added to.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq.kernels import build
from fairseq.kernels.arguments import is_plain, pointers, rows_and_columns, threads, trailing, type_of
from fairseq.kernels.noise import draw_seed, dropped_values, pick, scale_of, words_of

_MODES = {"plain": 0, "add": 1, "relu": 2, "relu gradient": 3}  # as in training.c
_SOURCE = Path(__file__).with_name("training.c")


def kernels(x: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels; None if there are none, or none for *x*."""
    return _compiled() if is_plain(x) else None


def dropout(x: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
    """The dropout of *x*, added to *residual* of its shape
    and type, without which *x* is on a CPU."""
    if residual is not None and x.device.type != "cpu":
        return _AddDropout.apply(residual, x, p)
    return _Dropout.apply(x, _noise(x, p), p, residual)


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """The dropout of relu(*x*); on GPUs by torch's kernels."""
    return _ReLUDropout.apply(x, _noise(x, p) if x.device.type == "cpu" else None, p)


def cross_entropy(logits: Tensor, target: Tensor, gradient: bool) -> Tensor | None:
    """−log softmax(logits [n, V])[target [n]]: [n], float64; None if no kernel computes it.

    With *gradient* the logits are overwritten with the gradient of the losses' sum.

    Raises:
        IndexError: a target is not in 0 … V − 1.
        ValueError: the target is no vector of n.
    """
    compiled = kernels(logits) if logits.is_contiguous() else None
    if compiled is None:
        return None
    # The kernel reads and writes at addresses: other shapes would be other memory.
    if target.shape != logits.shape[:1]:
        raise ValueError(f"target {list(target.shape)}: expected one word for each of {logits.size(0)} rows of logits")
    # The kernel reads at the address of each target, where an invalid one would be in other memory.
    low, high = torch.aminmax(target)
    if low < 0 or high >= logits.size(1):
        raise IndexError(f"target {int(low if low < 0 else high)} is out of range for {logits.size(1)} words")
    target = target.long().contiguous()
    losses = logits.new_empty(target.shape, dtype=torch.float64)
    sizes = *rows_and_columns(logits), *trailing(logits, gradient)
    compiled.cross_entropy(type_of(logits), *pointers(logits, target, losses), *sizes)
    return losses


def add_column_sums_(sums: Tensor, x: Tensor) -> None:
    """Add the sums of *x* [n, V] over its rows to *sums* [V], float32."""
    compiled = kernels(x) if x.is_contiguous() else None
    if compiled is None:
        sums.add_(x.sum(0, dtype=torch.float32))
    else:
        compiled.add_column_sums(type_of(x), *pointers(x, sums), *rows_and_columns(x), *trailing(x))


def transposed(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """*x* [m, n], float32, as [n, m], contiguous,
    and its sums over rows [n]; None if no kernel computes it."""
    compiled = kernels(x) if x.is_contiguous() and x.dtype == torch.float32 else None
    if compiled is None:
        return None
    result, sums = x.new_empty(x.size(1), x.size(0)), x.new_empty(x.size(1))
    compiled.transpose(*pointers(x, result, sums), *rows_and_columns(x), threads(x.numel()))
    return result, sums


class _Dropout(torch.autograd.Function):
    """Dropout, added to a residual connection or not;
    its gradient is a dropout with the same noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, p: float, residual: Tensor | None) -> Tensor:
        ctx.p, ctx.adds = p, residual is not None
        ctx.save_for_backward(noise)
        if _is_mask(noise):
            return _drop("add" if ctx.adds else "plain", x, residual, noise, p)
        dropped = pick(x, noise, p)
        return dropped if residual is None else residual + dropped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (noise,) = ctx.saved_tensors
        # Through autograd again: dropout is linear in x,
        # so that its gradient has a derivative, too.
        grad = _Dropout.apply(grads[0], noise, ctx.p, None) if ctx.needs_input_grad[0] else None
        return grad, None, None, grads[0] if ctx.adds else None


class _ReLUDropout(torch.autograd.Function):
    """Dropout after a ReLU; the backward pass needs only the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor | None, p: float) -> Tensor:
        ctx.p, ctx.fused, ctx.on_gpu = p, noise is not None and _is_mask(noise), noise is None
        if noise is None:
            y = torch.native_dropout(x.relu(), p, True)[0]
        else:
            y = _drop("relu", x, None, noise, p) if ctx.fused else pick(x, noise, p).clamp_min_(0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        if ctx.on_gpu:
            return torch.ops.aten.native_dropout_backward(grads[0], y > 0, 1 / (1 - ctx.p)), None, None
        if ctx.fused and not torch.is_grad_enabled():  # torch's operators have a second derivative
            return _drop("relu gradient", grads[0], y, None, ctx.p), None, None
        return torch.ops.aten.threshold_backward(grads[0], y, 0).mul_(scale_of(ctx.p)), None, None


class _AddDropout(torch.autograd.Function):
    """Dropout and the addition of a residual by torch's kernels, as on GPUs: the mask alone is
    written between them."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, p: float) -> Tensor:
        mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
        ctx.factor = 1 / (1 - p)
        ctx.save_for_backward(mask)
        return torch.addcmul(residual, x, mask, value=ctx.factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (mask,) = ctx.saved_tensors
        return grads[0], torch.ops.aten.native_dropout_backward(grads[0], mask, ctx.factor), None


def _noise(x: Tensor, p: float) -> Tensor:
    """What decides about the elements of *x*: a mask with a bit for each where kernels read it,
    else sixteen bits."""
    return (
        draw_mask(x.numel(), p)
        if kernels(x) is not None
        else torch.from_numpy(words_of(x.numel(), draw_seed()).view(np.int64))
    )


def draw_mask(size: int, p: float) -> Tensor:
    """A mask of dropout at the rate *p*, for kernels: a bit an element, 1 where it is kept."""
    # Kernels read and write up to eight bytes further than the last bit.
    mask = torch.empty(size // 8 + 8, dtype=torch.uint8, device="cpu")
    if p == 0:
        return mask.fill_(255)
    drawn = (ctypes.c_uint64(draw_seed()), ctypes.c_long(dropped_values(p)))
    _compiled().draw_mask(*drawn, *pointers(mask), ctypes.c_long(size), threads(size))
    return mask


def _is_mask(noise: Tensor) -> bool:
    return noise.dtype == torch.uint8


def _drop(mode: str, x: Tensor, other: Tensor | None, mask: Tensor | None, p: float) -> Tensor:
    """The kernel ``drop`` in one of its modes."""
    x, other = x.contiguous(), None if other is None else other.contiguous()
    y = torch.empty_like(x)
    tensors, size = pointers(x, other, y, mask), ctypes.c_long(x.numel())
    _compiled().drop(type_of(x), ctypes.c_long(_MODES[mode]), *tensors, _factor(p), size, *trailing(x))
    return y


def _compiled() -> Any:
    return build.library("training", _SOURCE)


def _factor(p: float) -> ctypes.c_float:
    return ctypes.c_float(scale_of(p))
