"""Layer norms under a GPU's autocast."""

from __future__ import annotations

import pytest
import torch

from fairseq.modules import norms as module
from fairseq.modules.norms import LayerNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_gpus_a_norm_reads_and_writes_the_lower_precision_to_its_rounding(dtype, monkeypatch):
    torch.manual_seed(0)
    norm, x = LayerNorm(64), torch.randn(9, 64).add_(3).to(dtype).requires_grad_()
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    parameters = [x, norm.weight, norm.bias]
    exact = [p.detach().double().requires_grad_() for p in parameters]
    expected = torch.nn.functional.layer_norm(exact[0], (64,), *exact[1:])
    monkeypatch.setattr(module, "is_cpu", lambda x: False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    gradients = [
        torch.autograd.grad(out.sum(), of)
        for out, of in ((y * y.detach(), parameters), (expected * expected.detach(), exact))
    ]
    for ours, theirs in zip((y, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (ours.double() - theirs).norm() < 0.01 * theirs.norm()
