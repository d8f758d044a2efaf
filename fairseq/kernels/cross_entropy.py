"""Cross entropy on CPUs, ``fairseq::cross_entropy``: losses of rows of logits, and their gradient
in the place of the logits (``cross_entropy.c``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.kernels import build
from fairseq.kernels.arguments import call, operator, threads

_SOURCE = Path(__file__).with_name("cross_entropy.c")


def compiled() -> Any:
    """The compiled kernels; None if there are none."""
    return build.library("cross entropy", _SOURCE)


@operator("fairseq::cross_entropy", mutates=("logits",))
def cross_entropy(logits: Tensor, target: Tensor, gradient: bool) -> Tensor:
    """−log softmax(logits [n, V])[target [n]]: [n], float64.

    With *gradient* the contiguous *logits* are overwritten with the gradient of the losses' sum.

    Raises:
        IndexError: a target is not in 0 … V − 1.
        ValueError: the target is no vector of n.
    """
    rows, columns = logits.shape
    # The kernel reads and writes at addresses: other shapes or strides would be other memory.
    if target.shape != logits.shape[:1] or not logits.is_contiguous():
        raise ValueError(f"target {list(target.shape)}: expected one word for each of {rows} rows of logits")
    low, high = torch.aminmax(target)
    if low < 0 or high >= columns:
        raise IndexError(f"target {int(low if low < 0 else high)} is out of range for {columns} words")
    losses = logits.new_empty(rows, dtype=torch.float64)
    target = target.long().contiguous()
    count = threads(logits.numel())
    call(compiled().cross_entropy, logits.dtype, logits, target, losses, rows, columns, gradient, count)
    return losses


@torch.library.register_fake("fairseq::cross_entropy")
def _(logits: Tensor, target: Tensor, gradient: bool) -> Tensor:
    return logits.new_empty(logits.size(0), dtype=torch.float64)
