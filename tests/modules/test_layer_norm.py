"""Layer norms under a GPU's autocast; NVIDIA apex's is used where it is available and allowed, and
the log says so."""

from __future__ import annotations

import sys
from types import ModuleType

import accelerators
import pytest
import torch
from mistakes import logged

from fairseq.modules import norms as module
from fairseq.modules.norms import LayerNorm, layer_norm


class FakeFusedLayerNorm(torch.nn.LayerNorm):
    """A stand-in that notes its calls."""

    def __init__(self, dim, eps):
        super().__init__(dim, eps)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.fixture
def apex(monkeypatch):
    package, normalization = ModuleType("apex"), ModuleType("apex.normalization")
    normalization.FusedLayerNorm = FakeFusedLayerNorm
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.normalization", normalization)
    module._apex_layer_norm.cache_clear()
    yield
    module._apex_layer_norm.cache_clear()


def test_apex_needs_a_gpu_and_permission(apex, monkeypatch, caplog):
    caplog.set_level("INFO")
    accelerators.found(monkeypatch, None)
    assert type(layer_norm(4)) is LayerNorm
    accelerators.found(monkeypatch, "cuda")
    assert type(layer_norm(4, apex=False)) is LayerNorm
    assert not caplog.records


def test_apexs_layer_norm_is_called_and_announced_once(apex, monkeypatch, caplog):
    caplog.set_level("INFO")
    accelerators.found(monkeypatch, "cuda")
    norms = [layer_norm(4, eps=1e-3) for _ in range(3)]
    assert all(isinstance(norm, FakeFusedLayerNorm) for norm in norms)
    x = torch.randn(2, 4)
    assert torch.equal(norms[0](x), torch.nn.LayerNorm(4, eps=1e-3)(x)) and norms[0].calls == 1
    assert logged(caplog) == ["layer norm: using NVIDIA apex's FusedLayerNorm; --no-apex turns it off"]


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
