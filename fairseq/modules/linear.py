"""Linear maps; on processors of AMD by oneDNN, whose products in float32 take half the time there.

torch gives products in float32 to Intel's MKL, which leaves AVX-512 unused on other makers'
processors: 220 GFLOP/s where oneDNN reaches 430, on two cores of a Zen 5. Products in bfloat16 go
to oneDNN in torch itself.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEWEST_ROWS = 64  # fewer make a product that is bound by reading the weight


class Linear(nn.Linear):
    """``torch.nn.Linear`` by :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, as ``torch.nn.functional.linear``:
    x [..., K], weight [N, K], bias [N] → [..., N]."""
    if not is_by_onednn(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x.reshape(-1, x.size(-1)), weight, bias).unflatten(0, x.shape[:-1])


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight, gradᵀ x: [n, N], [n, K] → [N, K]."""
    if not is_by_onednn(grad, x):
        return F.linear(grad.t(), x.t())
    # Its first factor is moved in memory. Moving x moves the result, too: a wide gradient.
    rows, outputs, inputs = len(x), grad.size(1), x.size(1)
    if rows * inputs + outputs * inputs < rows * outputs:
        return _Linear.apply(x.t(), grad.t(), None).t().contiguous()
    return _Linear.apply(grad.t(), x.t(), None)


def lowered(x: Tensor) -> Tensor:
    """*x* in the precision of the matrix products that read it, converted once; autocast converts
    it for each."""
    device = x.device.type
    # torch has no autocast for the meta device.
    if x.is_meta or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # torch's compiler has this operator for itself. Of the public ones, oneDNN computes
        # convolutions, too, but their gradients take a tenth longer where C is 1024.
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        # By functions with derivatives: so the gradients have derivatives, too.
        grad_x = _Linear.apply(grad, weight.t(), None) if of_x else None
        grad_weight = outer(grad, x) if of_weight else None
        return grad_x, grad_weight, grad.sum(0) if of_bias else None


def is_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear` leaves the product to oneDNN."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return False
    # The tensors of sharding and of exports know torch's operators alone.
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter)
    if not plain or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    # oneDNN has no products of nothing, which the gradient's would be without outputs.
    full = x.numel() >= _FEWEST_ROWS * x.size(-1) > 0 and weight.numel() > 0
    return full and bool(torch.backends.mkldnn.enabled) and _is_faster()


@functools.cache
def _is_faster() -> bool:
    """Whether this processor has AVX-512, and MKL does not use it."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
