"""What training computes between matrix products on CPUs, in one pass over memory each: kernels in C (``fused.c``).

They are compiled at first use; without them torch's operators give the same numbers to rounding, and the same masks.

torch's dropout draws one random number for each element on one thread, which costs more than the matrix product that it
follows. Here 16 bits decide about an element, four elements to a word of a faster generator; the rate is exact to
1/65536 (the kept values are scaled by what was really kept, so the expectation is exact).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fairseq.modules.native import library

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_MODES = {"plain": 0, "add": 1, "relu": 2, "relu gradient": 3}  # as in fused.c
_LEAST_WORK = 1 << 15  # elements per thread; fewer take no longer than it takes to start a thread
_LEVELS = 1 << 16
_SEEDS = 1 << 62
_LOWEST = torch.iinfo(torch.int16).min


def kernels(x: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels; None if there are none, or none for *x*."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in _TYPES or not x.numel():
        return None
    # Subclasses (fake, distributed and other tensors) have no data at their address, or not all of it.
    return _compiled() if type(x) in (Tensor, nn.Parameter) else None


def dropout(x: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
    """The dropout of *x*, added to *residual* of its shape and type."""
    return _Dropout.apply(x, _noise(x, p), p, residual)


def relu_dropout(x: Tensor, p: float) -> Tensor:
    """The dropout of relu(*x*)."""
    return _ReLUDropout.apply(x, _noise(x, p), p)


def softmax_dropout(scores: Tensor, p: float) -> Tensor:
    """The dropout of the softmax of *scores* over their last dimension."""
    noise = _noise(scores, p)
    if _is_mask(noise):
        return _SoftmaxDropout.apply(scores, noise, p)
    return _Dropout.apply(scores.softmax(-1), noise, p, None)


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
    if target.shape != logits.shape[:1]:  # the kernel reads and writes at addresses
        raise ValueError(f"target {list(target.shape)}: expected one word for each of {logits.size(0)} rows of logits")
    low, high = torch.aminmax(target)
    if low < 0 or high >= logits.size(1):
        raise IndexError(f"target {int(low if low < 0 else high)} is out of range for {logits.size(1)} words")
    target = target.long().contiguous()
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


class _Dropout(torch.autograd.Function):
    """Dropout, added to a residual connection or not; its gradient is a dropout with the same noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, p: float, residual: Tensor | None) -> Tensor:
        ctx.p, ctx.adds = p, residual is not None
        ctx.save_for_backward(noise)
        if _is_mask(noise):
            return _drop("add" if ctx.adds else "plain", x, residual, noise, p)
        dropped = _pick(x, noise, p)
        return dropped if residual is None else residual + dropped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (noise,) = ctx.saved_tensors
        grad = _Dropout.apply(grads[0], noise, ctx.p, None) if ctx.needs_input_grad[0] else None
        return grad, None, None, grads[0] if ctx.adds else None


class _ReLUDropout(torch.autograd.Function):
    """Dropout after a ReLU; the backward pass needs only the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor, p: float) -> Tensor:
        ctx.p, ctx.fused = p, _is_mask(noise)
        y = _drop("relu", x, None, noise, p) if ctx.fused else _pick(x, noise, p).clamp_min_(0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        if ctx.fused and not torch.is_grad_enabled():  # torch's operators have a second derivative
            return _drop("relu gradient", grads[0], y, None, ctx.p), None, None
        return torch.ops.aten.threshold_backward(grads[0], y, 0).mul_(_scale(ctx.p)), None, None


class _SoftmaxDropout(torch.autograd.Function):
    """Dropout after a softmax, by kernels."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, p: float) -> Tensor:
        ctx.p, scores = p, scores.contiguous()
        probabilities, dropped = torch.empty_like(scores), torch.empty_like(scores)
        pointers = _pointers(scores, probabilities, dropped, mask)
        _compiled().softmax_drop(_type(scores), *pointers, _factor(p), *_shape(scores), *_last(scores))
        ctx.save_for_backward(probabilities, mask)
        return dropped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        probabilities, mask = ctx.saved_tensors
        grad, result = grads[0].contiguous(), torch.empty_like(probabilities)
        pointers = _pointers(probabilities, grad, result, mask)
        _compiled().softmax_drop_gradient(_type(grad), *pointers, _factor(ctx.p), *_shape(grad), *_last(grad))
        return result, None, None


def _noise(x: Tensor, p: float) -> Tensor:
    """What decides about the elements of *x*: a mask with a bit for each where kernels read it, else sixteen bits.

    torch's generator draws the seed, so that a checkpoint's random state repeats it.
    """
    generator, compiled = np.random.SFC64(int(torch.randint(_SEEDS, (), device="cpu"))), kernels(x)
    if compiled is None:
        return torch.from_numpy(generator.random_raw(max(1, (x.numel() + 3) // 4)).view(np.int64))
    mask = torch.empty(x.numel() // 8 + 8, dtype=torch.uint8, device="cpu")  # kernels read up to four bytes further
    state = (ctypes.c_uint64 * 4)(*generator.state["state"]["state"].tolist())
    compiled.draw_mask(state, ctypes.c_long(_dropped(p)), *_pointers(mask), ctypes.c_long(x.numel()))
    return mask


def _is_mask(noise: Tensor) -> bool:
    return noise.dtype == torch.uint8


def _dropped(p: float) -> int:
    """Number of the 65536 values of sixteen bits that drop an element."""
    return min(max(round(p * _LEVELS), 0), _LEVELS - 1)


def _scale(p: float) -> float:
    """Factor of what is kept."""
    return _LEVELS / (_LEVELS - _dropped(p))


def _pick(x: Tensor, words: Tensor, p: float) -> Tensor:
    """*x* scaled where the noise *words* keep it, 0 elsewhere.

    Elements are picked by torch's threshold kernel, which runs at the speed of memory: a boolean mask would be
    converted and multiplied at a tenth of it.
    """
    threshold = _LOWEST + _dropped(p) - 1  # noise at or below it drops the element
    noise = words.view(torch.int16)[: x.numel()].view(x.shape).float()
    if x.dtype != torch.float32:
        noise = noise.sub_(threshold).to(x.dtype)  # only the sign matters, which every type keeps
        threshold = 0
    return torch.ops.aten.threshold_backward(x, noise, threshold).mul_(_scale(p))


def _drop(mode: str, x: Tensor, other: Tensor | None, mask: Tensor | None, p: float) -> Tensor:
    """The kernel ``drop`` in one of its modes."""
    x, other = x.contiguous(), None if other is None else other.contiguous()
    y = torch.empty_like(x)
    pointers, size = _pointers(x, other, y, mask), ctypes.c_long(x.numel())
    _compiled().drop(_type(x), ctypes.c_long(_MODES[mode]), *pointers, _factor(p), size, *_last(x))
    return y


def _compiled() -> Any:
    return library("training", Path(__file__).with_name("fused.c"))


def _type(x: Tensor) -> ctypes.c_long:
    return ctypes.c_long(_TYPES[x.dtype])


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in tensors]


def _factor(p: float) -> ctypes.c_float:
    return ctypes.c_float(_scale(p))


def _shape(x: Tensor) -> tuple[ctypes.c_long, ctypes.c_long]:
    """Rows and columns."""
    return ctypes.c_long(x.numel() // x.size(-1)), ctypes.c_long(x.size(-1))


def _last(x: Tensor, *switches: bool) -> list[ctypes.c_long]:
    """The last arguments of a kernel: switches, and the number of threads for *x*."""
    threads = max(1, min(torch.get_num_threads(), x.numel() // _LEAST_WORK))
    return [ctypes.c_long(value) for value in (*switches, threads)]
