"""Norms of hidden states, with their statistics in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules.dispatch import is_cpu, kernels
from fairseq.modules.linear import lowered


class LayerNorm(nn.LayerNorm):
    """torch's layer norm; under a GPU's autocast in the lower precision, with its statistics in
    float32.

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


def layer_norm(dim: int, eps: float = 1e-5, kind: str = "layer", bias: bool = True) -> nn.Module:
    """Norm of the last *dim* channels, of *kind* layer norm with or without *bias*, or RMS norm,
    which has none."""
    return RMSNorm(dim, eps=eps) if kind == "rms" else LayerNorm(dim, eps=eps, bias=bias)
