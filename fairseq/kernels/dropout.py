"""Dropout on CPUs by two operators: ``fairseq::dropout_mask``, and ``fairseq::masked_dropout`` that
applies it.

torch's dropout draws one random number for each element on one thread, which costs more than the
matrix product that it follows. ``dropout.c`` decides about an element by sixteen bits, four
elements to a word of a generator that threads share. The rate is exact to 1/65536, and what is kept
is scaled by what was really kept, so that the expectation is exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.kernels import build
from fairseq.kernels.arguments import call, threads

_LEVELS = 1 << 16
_SEEDS = 1 << 62  # torch draws signed numbers of 64 bits


def compiled() -> Any:
    """The compiled kernels; None if there are none."""
    return build.library("dropout", Path(__file__).with_name("dropout.c"))


def dropout(x: Tensor, p: float, relu: bool = False) -> Tensor:
    """*x*, or its positive part, with each element zeroed with probability *p* < 1, the others
    scaled by 1 / (1 − p)."""
    return masked_dropout(x, draw_mask(x.numel(), p), p, relu)


def draw_mask(size: int, p: float) -> Tensor:
    """A mask of *size* elements: a bit an element, 1 where it is kept."""
    # torch's generator draws the seed, so that a checkpoint's random state repeats the mask.
    return dropout_mask(torch.randint(_SEEDS, (), device="cpu"), size, p)


def scale_of(p: float) -> float:
    """The factor of what is kept."""
    return _LEVELS / (_LEVELS - _dropped_levels(p))


def _dropped_levels(p: float) -> int:
    # Never all values: the factor of the rest would be infinite.
    return min(round(p * _LEVELS), _LEVELS - 1)


@torch.library.custom_op("fairseq::dropout_mask", mutates_args=(), device_types="cpu")
def dropout_mask(seed: Tensor, size: int, p: float) -> Tensor:
    """The mask that follows from *seed*, int64: bits in bytes."""
    mask = _empty_mask(seed, size)
    mask[-8:] = 0  # of which the kernel writes some
    call(compiled().draw_mask, seed, _dropped_levels(p), mask, size, threads(size))
    return mask


@dropout_mask.register_fake
def _(seed: Tensor, size: int, p: float) -> Tensor:
    return _empty_mask(seed, size)


def _empty_mask(seed: Tensor, size: int) -> Tensor:
    # Kernels read and write up to eight bytes further than the last bit.
    return seed.new_empty(size // 8 + 8, dtype=torch.uint8)


@torch.library.custom_op("fairseq::masked_dropout", mutates_args=(), device_types="cpu")
def masked_dropout(x: Tensor, mask: Tensor, p: float, relu: bool) -> Tensor:
    """*x*, or its positive part, divided by 1 − *p* where *mask* keeps it, 0 elsewhere."""
    return _drop(x, mask, None, p, relu)


@torch.library.custom_op("fairseq::relu_dropout_gradient", mutates_args=(), device_types="cpu")
def relu_dropout_gradient(grad: Tensor, y: Tensor, p: float) -> Tensor:
    """The gradient from the result *y* alone, which is positive where its own is not 0."""
    return _drop(grad, None, y.contiguous(), p, False)


def _drop(x: Tensor, mask: Tensor | None, positive: Tensor | None, p: float, relu: bool) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    call(compiled().drop, x.dtype, relu, x, y, mask, positive, scale_of(p), x.numel(), threads(x.numel()))
    return y


@masked_dropout.register_fake
def _(x: Tensor, mask: Tensor, p: float, relu: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@relu_dropout_gradient.register_fake
def _(grad: Tensor, y: Tensor, p: float) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.p, ctx.relu = inputs
    ctx.save_for_backward(output if ctx.relu else mask)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (saved,) = ctx.saved_tensors
    of_x = relu_dropout_gradient(grad, saved, ctx.p) if ctx.relu else masked_dropout(grad, saved, ctx.p, False)
    return of_x, None, None, None


masked_dropout.register_autograd(_gradient, setup_context=_save)
