"""Norms of hidden states, with their statistics in float32."""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules.dispatch import is_cpu, kernels
from fairseq.modules.linear import lowered

logger = logging.getLogger(__name__)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm; under a GPU's autocast in the lower precision, as apex's, with its
    statistics in float32.

    Autocast would convert inputs to float32, and what reads the results would convert them back,
    for five times the bytes. Gain and bias are rounded as weights are.
    """

    def forward(self, x: Tensor) -> Tensor:
        # A CPU's autocast leaves norms alone, and its kernel takes gain and bias in float32.
        if is_cpu(x) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        weight, bias = lowered(self.weight), None if self.bias is None else lowered(self.bias)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x.to(weight.dtype), self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square, and a gain (Zhang &
    Sennrich 2019), in the precision of :class:`LayerNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        if is_cpu(x) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
            return rms_norm(x, self.weight, self.eps)
        weight = lowered(self.weight)
        # torch computes the mean of squares in float32.
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x.to(weight.dtype), self.normalized_shape, weight, self.eps)


def rms_norm(x: Tensor, gain: Tensor, eps: float | None) -> Tensor:
    """*x* [..., C] divided by its root mean square, times *gain* [C], in the type of *x*.

    Zhang & Sennrich 2019, "Root mean square layer normalization".
    """
    gain = gain.float()
    by_kernel = kernels("layers", x, gain) if gain.shape == x.shape[-1:] and eps is not None else None
    if by_kernel is None:
        return F.rms_norm(x.float(), gain.shape, gain, eps).to(x.dtype)
    return by_kernel.rms_norm(x, gain, eps)[0]


def layer_norm(dim: int, apex: bool = True, eps: float = 1e-5, kind: str = "layer", bias: bool = True) -> nn.Module:
    """Norm of the last *dim* channels, of *kind* layer norm with or without *bias*, or RMS norm,
    which has none.

    Layer norm with a bias is apex's on a GPU, if *apex* allows it and it can be imported.
    """
    if kind == "rms":
        return RMSNorm(dim, eps=eps)
    if not bias:
        return LayerNorm(dim, eps=eps, bias=False)
    fused = _apex_layer_norm() if apex and torch.accelerator.is_available() else None
    return (fused or LayerNorm)(dim, eps=eps)


# Once: the log has one line for a run, not one for every norm.
@functools.cache
def _apex_layer_norm() -> type[nn.Module] | None:
    try:
        from apex.normalization import FusedLayerNorm
    except ImportError:
        return None
    logger.info("layer norm: using NVIDIA apex's FusedLayerNorm; `no_apex` turns it off")
    return FusedLayerNorm
