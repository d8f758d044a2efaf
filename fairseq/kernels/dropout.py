"""Dropout on CPUs, ``fairseq::dropout``, and ``fairseq::dropout_mask`` for attention.

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
from fairseq.kernels.arguments import call, no_second_derivative, operator, threads

_SOURCE = Path(__file__).with_name("dropout.c")
_LEVELS = 1 << 16
_SEEDS = 1 << 62  # torch draws signed numbers of 64 bits


def compiled() -> Any:
    """The compiled kernels; None if there are none."""
    return build.library("dropout", _SOURCE)


def dropout(x: Tensor, p: float, residual: Tensor | None = None, relu: bool = False) -> Tensor:
    """*x*, or its positive part, with each element zeroed with probability *p* < 1, the others
    scaled by 1 / (1 − p); added to *residual* of its shape and type."""
    return drop(x, residual, draw_seed(), p, relu)[0]


def draw_mask(size: int, p: float) -> Tensor:
    """A mask of *size* elements: a bit an element, 1 where it is kept."""
    return dropout_mask(draw_seed(), size, p)


def draw_seed() -> Tensor:
    """The seed of the next mask: torch's generator draws it,
    so that a checkpoint's random state repeats it."""
    return torch.randint(_SEEDS, (), device="cpu")


def scale_of(p: float) -> float:
    """The factor of what is kept."""
    return _LEVELS / (_LEVELS - _dropped_levels(p))


def _dropped_levels(p: float) -> int:
    # Never all values: the factor of the rest would be infinite.
    return min(round(p * _LEVELS), _LEVELS - 1)


@operator("fairseq::dropout_mask")
def dropout_mask(seed: Tensor, size: int, p: float) -> Tensor:
    """The mask that follows from *seed*, int64: bits in bytes."""
    return _mask(seed, size, p)


@torch.library.register_fake("fairseq::dropout_mask")
def _(seed: Tensor, size: int, p: float) -> Tensor:
    return _empty_mask(seed, size)


@operator("fairseq::dropout")
def drop(x: Tensor, residual: Tensor | None, seed: Tensor, p: float, relu: bool) -> tuple[Tensor, Tensor]:
    """*x*, or its positive part, divided by 1 − *p* where the mask keeps it, 0 elsewhere, plus
    *residual*; and the mask."""
    mask = _mask(seed, x.numel(), p)
    residual = None if residual is None else residual.contiguous()
    return _drop(x, residual, mask, None, p, relu), mask


@torch.library.register_fake("fairseq::dropout")
def _(x: Tensor, residual: Tensor | None, seed: Tensor, p: float, relu: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), _empty_mask(seed, x.numel())


@operator("fairseq::dropout_gradient")
def drop_gradient(grad: Tensor, saved: Tensor, p: float, relu: bool) -> Tensor:
    """The gradient from *saved*, the mask; with *relu* the result, positive where its own is not
    0."""
    mask, positive = (None, saved.contiguous()) if relu else (saved, None)
    return _drop(grad, None, mask, positive, p, False)


@torch.library.register_fake("fairseq::dropout_gradient")
def _(grad: Tensor, saved: Tensor, p: float, relu: bool) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


no_second_derivative("fairseq::dropout_gradient")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, _, ctx.p, ctx.relu = inputs
    ctx.save_for_backward(output[0] if ctx.relu else output[1])


def _gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    of_x = drop_gradient(grad, *ctx.saved_tensors, ctx.p, ctx.relu) if ctx.needs_input_grad[0] else None
    return of_x, grad if ctx.needs_input_grad[1] else None, None, None, None


torch.library.register_autograd("fairseq::dropout", _gradients, setup_context=_save)


def _drop(
    x: Tensor, residual: Tensor | None, mask: Tensor | None, positive: Tensor | None, p: float, relu: bool
) -> Tensor:
    x = x.contiguous()
    y, size = torch.empty_like(x), x.numel()
    call(compiled().drop, x.dtype, relu, x, residual, y, mask, positive, scale_of(p), size, threads(size))
    return y


def _mask(seed: Tensor, size: int, p: float) -> Tensor:
    mask = _empty_mask(seed, size)
    call(compiled().draw_mask, seed, _dropped_levels(p), mask, size, threads(size))
    return mask


def _empty_mask(seed: Tensor, size: int) -> Tensor:
    # Kernels read and write up to eight bytes further than the last bit.
    return seed.new_empty(size // 8 + 8, dtype=torch.uint8)
