"""Dropout, by kernels in C on CPUs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules.dispatch import kernels


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """*x* with each element zeroed with probability *p*, the others scaled by 1 / (1 − p).

    Shape: any; the result has the shape and type of *x*.
    """
    if not training or p == 0.0:
        return x
    # Sixteen bits decide about an element, which cannot drop all of them.
    by_kernel = kernels("dropout", x) if p < 1.0 else None
    return F.dropout(x, p) if by_kernel is None else by_kernel.dropout(x, p)


def add_dropout(residual: Tensor, x: Tensor, p: float, training: bool = True) -> Tensor:
    """``residual + dropout(x, p)``."""
    # The kernel adds element by element: it neither broadcasts nor promotes types.
    alike = (residual.shape, residual.dtype) == (x.shape, x.dtype)
    by_kernel = kernels("dropout", x, residual) if alike and training and 0.0 < p < 1.0 else None
    return residual + dropout(x, p, training) if by_kernel is None else by_kernel.dropout(x, p, residual)


def relu_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """``dropout(relu(x), p)``; the backward pass of the kernel needs only the result."""
    by_kernel = kernels("dropout", x) if training and 0.0 < p < 1.0 else None
    return dropout(F.relu(x), p, training) if by_kernel is None else by_kernel.dropout(x, p, relu=True)


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
