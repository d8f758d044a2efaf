"""Norm and clipping of gradients, without copies of them and without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairseq.optim.elementwise import is_half, slices


def norm_and_factor(
    parameters: Sequence[torch.nn.Parameter],
    factor: Tensor | float,
    clip_norm: float,
    device: torch.device,
    total: Callable[[Tensor], Tensor] = lambda norm: norm,
) -> tuple[Tensor, Tensor | float]:
    """Return the norm of the gradients times *factor*, and *factor* lowered to clip that norm.

    Gradients stay as they are: the optimizer applies the factor, in float32.

    Args:
        parameters: those without a gradient do not count.
        factor: the reciprocal of what gradients are divided by, a number or a float32 scalar on *device*.
        clip_norm: the largest norm after clipping; 0: no clipping.
        total: returns the norm of all gradients from the norm of the local ones, where other processes have parts, too.

    Returns:
        The norm before clipping, a float32 scalar on *device*, and the factor: a scalar too, or a number.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    # torch widens a whole tensor of half precision before it reduces it, so it gets slices.
    pieces = [piece for gradient in gradients for piece in (slices(gradient) if is_half(gradient) else (gradient,))]
    norms = torch._foreach_norm(pieces, 2, torch.float32) if pieces else [torch.zeros((), device=device)]
    gnorm = total(torch.linalg.vector_norm(torch.stack(norms)).to(device)) * factor
    if clip_norm > 0:
        # 1e-6 as torch.nn.utils.clip_grad_norm_ and fairseq have it.
        factor = factor * (clip_norm / (gnorm + 1e-6)).clamp(max=1.0)
    return gnorm, factor
