"""Linear maps by oneDNN: torch's to rounding, with all derivatives, where they are faster and nowhere else."""

import pytest
import torch
import torch.nn.functional as F

from fairseq.modules import linear as linear_module
from fairseq.modules.linear import Linear, is_by_onednn, linear


@pytest.fixture
def onednn(monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(linear_module, "_is_faster", lambda: True)


@pytest.mark.parametrize("outputs", [24, 200])
@pytest.mark.parametrize("biased", [True, False])
def test_products_and_gradients_are_those_of_float64(onednn, outputs, biased):
    torch.manual_seed(1)
    x, weight = torch.randn(4, 32, 48, requires_grad=True), torch.randn(outputs, 48, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True) if biased else None
    assert is_by_onednn(x, weight)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    results = []
    for double in (False, True):
        own = [leaf.detach().double().requires_grad_() if double else leaf for leaf in leaves]
        y = (F.linear if double else linear)(*own)
        first = torch.autograd.grad(y.square().sum(), own, create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), own)
        results.append([y, *first, *second])
    for ours, exact in zip(*results, strict=True):
        assert ours.shape == exact.shape
        assert (ours - exact).norm() < 1e-6 * exact.norm()


def test_without_gradients_and_with_frozen_parts(onednn):
    x, layer = torch.randn(64, 16), Linear(16, 8)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.bias.grad, torch.full((8,), 64.0))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_torch_computes_the_rest(onednn):
    x, weight = torch.randn(64, 16), torch.randn(8, 16)
    assert not is_by_onednn(x[:63], weight)  # few rows
    assert not is_by_onednn(x[:, :0], weight[:, :0])
    assert not is_by_onednn(x.bfloat16(), weight.bfloat16())
    assert not is_by_onednn(x.double(), weight.double())
    assert not is_by_onednn(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_by_onednn(x, weight)
        assert linear(x, weight).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:TF32")
def test_torchs_switch_turns_it_off(onednn):
    x, weight = torch.randn(64, 16), torch.randn(8, 16)
    with torch.backends.mkldnn.flags(enabled=False):
        assert not is_by_onednn(x, weight)
    assert is_by_onednn(x, weight)


def test_other_processors_keep_torchs_products(monkeypatch):
    monkeypatch.setattr(linear_module, "_is_faster", lambda: False)
    x, layer = torch.randn(64, 16), Linear(16, 8)
    assert not is_by_onednn(x, layer.weight)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_a_mistaken_shape_is_an_error(onednn):
    with pytest.raises(RuntimeError):
        linear(torch.randn(64, 16), torch.randn(8, 17))
    with pytest.raises(RuntimeError):
        linear(torch.randn(64, 16), torch.randn(8, 16), torch.randn(9))
