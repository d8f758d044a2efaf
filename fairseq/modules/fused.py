"""What training computes between matrix products, in one pass each: kernels in C for CPUs, compiled at first use.

Where :func:`kernels` returns None, torch's operators run instead and give the same numbers to rounding.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq.modules.native import library

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LEVELS = 1 << 16
_SEEDS = 1 << 62
_GROUP = 32  # as in fused.c


class _Dropout(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_uint64), ("dropped", ctypes.c_long), ("scale", ctypes.c_float)]


@dataclass(frozen=True)
class Mask:
    """Elements that a dropout keeps: sixteen bits of a hash of seed, row and column decide about each.

    The rate is exact to 1/65536; what is kept is scaled by the share that is really kept, so the expectation is exact.

    Attributes:
        seed: below 2⁶².
        dropped: number of the 65536 values of sixteen bits that drop an element.
    """

    seed: int
    dropped: int

    @classmethod
    def draw(cls, p: float) -> Mask:
        """A new mask of rate *p*; torch's generator draws the seed, so that a checkpoint's random state repeats it."""
        seed = int(torch.randint(_SEEDS, ())) if p else 0
        return cls(seed, min(max(round(p * _LEVELS), 0), _LEVELS - 1))

    @property
    def scale(self) -> float:
        """Factor of what is kept."""
        return _LEVELS / (_LEVELS - self.dropped)

    def struct(self) -> Any:
        """The mask as an argument of the kernels."""
        return ctypes.byref(_Dropout(self.seed, self.dropped, self.scale))

    def keeps(self, shape: torch.Size) -> Tensor:
        """True for the elements that are kept; the kernels' bits, computed with numpy."""
        columns = max(1, shape[-1] if shape else 1)
        groups = -(-columns // _GROUP)
        rows = shape.numel() // columns
        words = np.arange(rows * groups * _GROUP // 2, dtype=np.uint32)
        words = _mixed(_mixed(words ^ np.uint32(self.seed & 0xFFFFFFFF)) + np.uint32(self.seed >> 32))
        halves = words.astype("<u4").view("<u2").reshape(rows, groups, _GROUP // 2, 2)
        bits = halves.swapaxes(2, 3).reshape(rows, groups * _GROUP)[:, :columns]
        return torch.from_numpy(bits >= self.dropped).view(shape)


def _mixed(words: Any) -> Any:
    """The finaliser of MurmurHash3."""
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return words ^ words >> np.uint32(16)


def kernels(*tensors: Tensor) -> ctypes.CDLL | None:
    """The compiled kernels; None if there are none, or none for *tensors*."""
    first = tensors[0]
    if first.dtype not in _TYPES or not first.numel() or not first.dim():
        return None
    if any(type(x) not in (Tensor, nn.Parameter) or x.dtype != first.dtype or x.is_meta for x in tensors):
        return None
    return library("training", Path(__file__).with_name("fused.c"))


def drop(x: Tensor, residual: Tensor | None, mask: Mask, relu: bool = False) -> Tensor:
    """*residual* plus the dropout of *x*, or the dropout of relu(*x*): the same shape and type; no gradient."""
    compiled = kernels(x) if residual is None or residual.shape != x.shape else kernels(x, residual)
    if compiled is None:
        y = torch.where(mask.keeps(x.shape), x, 0).mul_(mask.scale)
        y = y.clamp_min_(0) if relu else y
        return y if residual is None else residual + y
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    y = torch.empty_like(x)
    compiled.drop(*_type(x), _pointer(x), _pointer(residual), _pointer(y), *_shape(x), mask.struct(), *_last(relu))
    return y


def softmax_drop(scores: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """The softmax of *scores* over their last dimension, and its dropout; no gradient."""
    compiled = kernels(scores)
    if compiled is None:
        probabilities = scores.softmax(-1)
        return probabilities, drop(probabilities, None, mask)
    scores = scores.contiguous()
    both = torch.empty_like(scores), torch.empty_like(scores)
    compiled.softmax_drop(*_type(scores), *map(_pointer, (scores, *both)), *_shape(scores), mask.struct(), *_last())
    return both


def softmax_drop_gradient(probabilities: Tensor, grad: Tensor, mask: Mask) -> Tensor:
    """The gradient of the scores of :func:`softmax_drop`, from that of the dropout."""
    compiled = kernels(probabilities, grad)
    if compiled is None:
        grad = drop(grad, None, mask)
        return torch.ops.aten._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)
    result, grad = torch.empty_like(probabilities), grad.contiguous()
    compiled.softmax_drop_gradient(
        *_type(grad), *map(_pointer, (probabilities, grad, result)), *_shape(grad), mask.struct(), *_last()
    )
    return result


def cross_entropy_(logits: Tensor, target: Tensor, gradient: bool) -> Tensor | None:
    """−log softmax(logits [n, V])[target [n]]: [n], float32; None if no kernel computes it.

    With *gradient* the logits are overwritten with the gradient of the losses' sum.
    """
    if logits.device.type != "cpu" or logits.dtype == torch.float16 or not logits.is_contiguous():
        return None
    compiled = kernels(logits)
    if compiled is None:
        return None
    target = target.contiguous()
    losses = logits.new_empty(target.shape, dtype=torch.float32)
    compiled.cross_entropy(*_type(logits), *map(_pointer, (logits, target, losses)), *_shape(logits), *_last(gradient))
    return losses


def _type(x: Tensor) -> tuple[ctypes.c_long]:
    return (ctypes.c_long(_TYPES[x.dtype]),)


def _pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _shape(x: Tensor) -> tuple[ctypes.c_long, ctypes.c_long]:
    """Rows and columns."""
    return ctypes.c_long(x.numel() // x.size(-1)), ctypes.c_long(x.size(-1))


def _last(*switches: bool) -> tuple[ctypes.c_long, ...]:
    """The last arguments of a kernel: switches, and the number of threads."""
    return tuple(ctypes.c_long(value) for value in (*switches, torch.get_num_threads()))
