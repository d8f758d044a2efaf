"""Layer normalisation, by NVIDIA apex's fused kernel where that is at hand."""

from __future__ import annotations

import torch
from torch import nn


def layer_norm(dim: int, apex: bool = True, eps: float = 1e-5) -> nn.Module:
    """Layer normalisation over the last *dim* channels, with *eps* added to the variance.

    apex's ``FusedLayerNorm`` is taken when *apex* allows it, the package is importable and CUDA is there; parameter
    names are the same.
    """
    if apex and torch.cuda.is_available():
        try:
            from apex.normalization import FusedLayerNorm
        except ImportError:
            pass
        else:
            return FusedLayerNorm(dim, eps=eps)
    return nn.LayerNorm(dim, eps=eps)
