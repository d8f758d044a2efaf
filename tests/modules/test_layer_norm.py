"""NVIDIA apex's layer norm is used where it is available and allowed, and the log says so."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from mistakes import logged

from fairseq.modules import transformer_layer as module
from fairseq.modules.transformer_layer import layer_norm


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert type(layer_norm(4)) is torch.nn.LayerNorm
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert type(layer_norm(4, apex=False)) is torch.nn.LayerNorm
    assert not caplog.records


def test_apexs_layer_norm_is_called_and_announced_once(apex, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    norms = [layer_norm(4, eps=1e-3) for _ in range(3)]
    assert all(isinstance(norm, FakeFusedLayerNorm) for norm in norms)
    x = torch.randn(2, 4)
    assert torch.equal(norms[0](x), torch.nn.LayerNorm(4, eps=1e-3)(x)) and norms[0].calls == 1
    assert logged(caplog) == ["layer norm: using NVIDIA apex's FusedLayerNorm; --no-apex turns it off"]
