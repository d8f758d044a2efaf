"""Linear maps by oneDNN: torch's to rounding, where they are faster and
nowhere else."""

import pytest
import torch
import torch.nn.functional as F

from fairseq.modules import linear as linear_module
from fairseq.modules.linear import Linear, is_by_onednn, linear, outer


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
        results.append([y, *torch.autograd.grad(y.square().sum(), own)])
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
    assert not is_by_onednn(x, weight[:0])  # its gradient is a product of nothing
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


def test_without_the_operator_of_torchs_compiler_products_are_torchs(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not linear_module._is_faster.__wrapped__()


def test_a_mistaken_shape_is_an_error(onednn):
    with pytest.raises(RuntimeError):
        linear(torch.randn(64, 16), torch.randn(8, 17))
    with pytest.raises(RuntimeError):
        linear(torch.randn(64, 16), torch.randn(8, 16), torch.randn(9))


@pytest.mark.parametrize("columns", [(16, 48), (48, 16), (33, 7), (70, 70)])
@pytest.mark.parametrize("rows", [64, 67, 5])
def test_the_gradient_of_a_weight_is_a_product_over_rows(onednn, rows, columns):
    torch.manual_seed(1)
    grad, x = (torch.randn(rows, count) for count in columns)
    exact = grad.double().t() @ x.double()
    assert outer(grad, x).is_contiguous()
    assert (outer(grad, x) - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("number", [0, 1])
def test_tensors_of_others_and_other_types_have_products_of_torch(onednn, number):
    leaves = [torch.randn(64, 16), torch.randn(64, 8)]
    for change in (torch.Tensor.bfloat16, torch.Tensor.double):
        tensors = [change(leaf) for leaf in leaves]
        assert torch.equal(outer(*tensors), F.linear(tensors[0].t(), tensors[1].t()))
    leaves[number] = leaves[number].t().contiguous().t()
    torch.testing.assert_close(outer(*leaves), leaves[0].t() @ leaves[1])
