"""Dropout with a fast random generator for CPUs.

torch draws one random number for each element on one CPU thread, which costs more than the matrix product that it
follows. Here 16 bits decide about an element, four elements to a word of a faster generator; the rate is
exact to 1/65536 (the kept values are scaled by what was really kept, so the expectation is exact). On GPUs, and under
``torch.compile``, torch's own fused dropout is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 16
_SEEDS = 1 << 62
_LOWEST = torch.iinfo(torch.int16).min


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """*x* with each element zeroed with probability *p*, the others scaled by 1 / (1 − p).

    Shape: any; the result has the shape and type of *x*.
    """
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return _Dropout.apply(x, p)


def relu_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """``dropout(relu(x), p)``; the backward pass needs only the result, so no mask is stored."""
    if not training or p == 0.0:
        return F.relu(x)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(F.relu(x), p)
    return _ReLUDropout.apply(x, p)


def variational_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout with one mask for all time steps (Gal & Ghahramani 2016, §4.1): x [B, T, C], a mask [B, 1, C]."""
    if not training or p == 0.0:
        return x
    return x * F.dropout(x.new_ones(x.size(0), 1, x.size(2)), p)


class Dropout(nn.Module):
    """:func:`dropout` as a module, for use inside ``nn.Sequential``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _noise(x: Tensor) -> Tensor:
    """Sixteen random bits an element of *x*, four elements to a word; torch's generator draws the seed."""
    seed = int(torch.randint(_SEEDS, ()))
    words = np.random.SFC64(seed).random_raw(max(1, (x.numel() + 3) // 4))
    return torch.from_numpy(words.view(np.int64))


def _dropped(p: float) -> int:
    """Number of the 65536 values of sixteen bits that drop an element."""
    return min(max(round(p * _LEVELS), 0), _LEVELS - 1)


def _pick(x: Tensor, words: Tensor, p: float) -> Tensor:
    """*x* scaled where the noise *words* keep it, 0 elsewhere.

    Elements are picked by torch's threshold kernel, which runs at the speed of memory: a boolean mask would be
    converted and multiplied at a tenth of it.
    """
    dropped = _dropped(p)
    threshold = _LOWEST + dropped - 1  # noise at or below it drops the element
    noise = words.view(torch.int16)[: x.numel()].view(x.shape).float()
    if x.dtype != torch.float32:
        noise = noise.sub_(threshold).to(x.dtype)  # only the sign matters, which every type keeps
        threshold = 0
    return torch.ops.aten.threshold_backward(x, noise, threshold).mul_(_LEVELS / (_LEVELS - dropped))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        # Saved for the backward pass: two bytes an element, from which the same elements are picked again.
        words = _noise(x)
        ctx.p = p
        ctx.save_for_backward(words)
        return _pick(x, words, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (words,) = ctx.saved_tensors
        return _pick(grads[0], words, ctx.p), None


class _ReLUDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        y = _pick(x, _noise(x), p).clamp_min_(0)
        ctx.scale = _LEVELS / (_LEVELS - _dropped(p))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grads[0], y, 0).mul_(ctx.scale), None
