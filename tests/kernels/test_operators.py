"""The kernels are operators of torch: with fake implementations and gradients, also compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairseq.kernels import attention, cross_entropy, dropout, layers
from fairseq.modules import dispatch
from fairseq.modules.attention import SelfAttention
from fairseq.modules.relative_attention import RelativeAttention, RelativePositions
from fairseq.modules.transformer_layer import TransformerLayer

pytestmark = pytest.mark.skipif(dispatch.compiled("attention") is None, reason="no C compiler")


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def heads(*lengths: int) -> list[Tensor]:
    return [leaf(2, 3, length, 8) for length in lengths]


NAMES = [
    *("mask", "dropout", "dropout of a ReLU", "cross entropy", "norm", "rotation"),
    *("attention without gradient", "attention by distance"),
]


def operands(name: str) -> tuple[Any, tuple[Any, ...]]:
    """An operator and its arguments."""
    torch.manual_seed(1)
    mask = dropout.draw_mask(2 * 3 * 6 * 10, 0.2)
    query, distance, past, past_value, key, value = heads(6, 6, 4, 4, 6, 6)
    # Not causal: of hidden keys nothing is written into the probabilities.
    by_distance = (query, distance, leaf(3, 10, 8), past, past_value, key, value, None, mask, 1.0, 0.2, False, True)
    plain = (query.detach(), None, None, None, None, key.detach(), value.detach(), torch.zeros(6, 6), None)
    return {
        "mask": (dropout.dropout_mask, (torch.tensor(7), 50, 0.3)),
        "dropout": (dropout.drop, (leaf(3, 5), leaf(3, 5), torch.tensor(7), 0.3, False)),
        "dropout of a ReLU": (dropout.drop, (leaf(3, 5), None, torch.tensor(7), 0.3, True)),
        "norm": (layers.rms_norm, (leaf(3, 5), leaf(5), 1e-5)),
        "rotation": (layers.rotated, (leaf(2, 3, 4, 6), torch.randn(4, 2, 3), 1.0)),
        "cross entropy": (cross_entropy.cross_entropy, (torch.randn(4, 9), torch.arange(4), True)),
        "attention without gradient": (attention.attend, (*plain, 0.3, 0.0, False, False)),
        "attention by distance": (attention.attend, by_distance),
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_torch_finds_no_mistake_in_an_operator(name: str) -> None:
    operator, arguments = operands(name)
    torch.library.opcheck(operator, arguments)


class Graphs:
    """A compiler that keeps the names of the graphs' operators, and runs them as they are."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.names |= {str(node.target).removesuffix(".default") for node in graph.graph.nodes}
        return graph.forward


def gradients(function: Any, module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    module.zero_grad()
    torch.manual_seed(3)
    x = inputs[0].clone().requires_grad_()
    y = function(x, *inputs[1:])
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["absolute", "relative"])
def test_a_layer_is_one_graph_with_the_operators_and_computes_the_same(kind: str, p: float) -> None:
    torch.manual_seed(1)
    relative = RelativeAttention(32, 4, p, head_dim=8)
    layer = TransformerLayer(
        relative if kind == "relative" else SelfAttention(32, 4, p), 32, 64, dropout=p, activation_dropout=p
    )
    positions = RelativePositions(torch.randn(24, 32)) if kind == "relative" else None
    graphs = Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    x, memory = torch.randn(2, 12, 32), torch.randn(2, 12, 32)
    found = gradients(lambda x, m: compiled(x, m, positions)[0], layer, x, memory)
    expected = gradients(lambda x, m: layer(x, m, positions)[0], layer, x, memory)
    torch.testing.assert_close(found, expected)
    assert graphs.names >= {"fairseq.attention", *(["fairseq.dropout"] if p else [])}


def test_one_graph_computes_layers_of_any_length() -> None:
    torch.manual_seed(1)
    layer = TransformerLayer(SelfAttention(32, 4), 32, 64)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset()  # no graphs of other tests
    for length in (14, 20):
        x, memory = torch.randn(2, length, 32), torch.randn(2, 12, 32)
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = gradients(lambda x, m: compiled(x, m)[0], layer, x, memory)
        expected = gradients(lambda x, m: layer(x, m)[0], layer, x, memory)
        torch.testing.assert_close(found, expected)
