"""Dropout by kernels in C where that saves passes over memory; torch's under ``torch.compile``."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """*x* with each element zeroed with probability *p*, the others scaled by 1 / (1 − p).

    Shape: any; the result has the shape and type of *x*.
    """
    if not training or p == 0.0:
        return x
    return kernels("training").dropout(x, p) if is_cpu(x) and _has_kernels(p) else F.dropout(x, p)


def add_dropout(residual: Tensor, x: Tensor, p: float, training: bool = True) -> Tensor:
    """``residual + dropout(x, p)``."""
    # The kernel adds element by element: it neither broadcasts nor promotes types.
    if training and p > 0.0 and _has_kernels(p) and (residual.shape, residual.dtype) == (x.shape, x.dtype):
        return kernels("training").dropout(x, p, residual)
    return residual + dropout(x, p, training)


def relu_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """``dropout(relu(x), p)``; the backward pass needs only the result, so no mask is stored."""
    if not training or p == 0.0:
        return F.relu(x)
    return kernels("training").relu_dropout(x, p) if _has_kernels(p) else F.dropout(F.relu(x), p)


def variational_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Dropout with one mask for all time steps (Gal & Ghahramani 2016, §4.1): x [B, T, C], a mask
    [B, 1, C]."""
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


def _has_kernels(p: float) -> bool:
    # Sixteen bits decide about an element, which cannot drop all of them.
    return p < 1.0 and not torch.compiler.is_compiling()


@functools.cache
def kernels(part: str) -> Any:
    """The module *part* of ``fairseq.kernels``, loaded when one is used."""
    return importlib.import_module(f"fairseq.kernels.{part}")


def is_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def on_cpu(x: Tensor) -> bool:
    """Return True where *x* is computed by the steps written out for CPUs; torch.compile has
    kernels of its own."""
    return is_cpu(x) and not torch.compiler.is_compiling()
