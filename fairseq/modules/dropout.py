"""Dropout whose mask is computed again in the backward pass instead of being stored.

torch draws one random number for each element on one CPU thread, which costs more than the matrix product that it
follows. Here a hash of the position decides (:class:`~fairseq.modules.fused.Mask`), and what stands beside a dropout is
computed in the same pass over memory. On GPUs, and under ``torch.compile``, torch's own fused dropout is used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """*x* with each element zeroed with probability *p*, the others scaled by 1 / (1 − p).

    Shape: any; the result has the shape and type of *x*.
    """
    if not training or p == 0.0:
        return x
    return _Dropout.apply(x, None, _fused().Mask.draw(p)) if _on_cpu(x) else F.dropout(x, p)


def add_dropout(residual: Tensor, x: Tensor, p: float, training: bool = True) -> Tensor:
    """``residual + dropout(x, p)``, for two tensors of one shape."""
    if training and p > 0.0 and _on_cpu(x) and residual.dtype == x.dtype and residual.shape == x.shape:
        return _Dropout.apply(x, residual, _fused().Mask.draw(p))
    return residual + dropout(x, p, training)


def relu_dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """``dropout(relu(x), p)``; the backward pass needs only the result."""
    if not training or p == 0.0:
        return F.relu(x)
    return _ReLUDropout.apply(x, _fused().Mask.draw(p)) if _on_cpu(x) else F.dropout(F.relu(x), p)


def softmax_dropout(scores: Tensor, p: float) -> Tensor:
    """``dropout(softmax(scores), p)`` over the last dimension."""
    if p == 0.0 or not _on_cpu(scores):
        return dropout(scores.softmax(-1), p)
    return _SoftmaxDropout.apply(scores, _fused().Mask.draw(p))


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


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _fused() -> Any:
    from fairseq.modules import fused  # when a model is first trained on a CPU: inference needs no kernels of training

    return fused


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, mask: Any) -> Tensor:
        ctx.mask, ctx.adds = mask, residual is not None
        return _fused().drop(x, residual, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return _Dropout.apply(grads[0], None, ctx.mask), grads[0] if ctx.adds else None, None


class _ReLUDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Any) -> Tensor:
        y: Tensor = _fused().drop(x, None, mask, relu=True)
        ctx.scale = mask.scale
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grads[0], y, 0).mul_(ctx.scale), None


class _SoftmaxDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Any) -> Tensor:
        probabilities, dropped = _fused().softmax_drop(scores, mask)
        ctx.mask = mask
        ctx.save_for_backward(probabilities)
        return dropped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        return _fused().softmax_drop_gradient(probabilities, grads[0], ctx.mask), None
