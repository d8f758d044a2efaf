"""Layer normalisation, by NVIDIA apex's fused kernel where it is available."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


def layer_norm(dim: int, apex: bool = True, eps: float = 1e-5) -> nn.Module:
    """Return layer normalisation over the last *dim* channels.

    It is apex's ``FusedLayerNorm`` if *apex* allows it, the package can be imported and CUDA is available; parameter
    names are the same. The log says so, once.
    """
    fused = _apex_layer_norm() if apex and torch.cuda.is_available() else None
    return (fused or nn.LayerNorm)(dim, eps=eps)


@functools.cache
def _apex_layer_norm() -> Any:
    try:
        from apex.normalization import FusedLayerNorm
    except ImportError:
        return None
    logger.info("layer norm: using NVIDIA apex's FusedLayerNorm; --no-apex turns it off")
    return FusedLayerNorm
