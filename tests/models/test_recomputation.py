"""Activations that the backward pass computes again: the same gradients, and what is kept."""

from __future__ import annotations

from typing import Any

import noted
import pytest
import runs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq.models import layerwise

XL = "--arch transformer_xl --n-layer 2 --d-model 16 --n-head 2 --d-inner 24 --mem-len 16 --cutoffs 200,600 --cpu"
FAMILIES = {
    "transformer_lm": runs.BASELINE,
    "shortformer": runs.SHORTFORMER,
    "transformer-xl": XL,
    "llama": "--arch llama_tiny --dropout 0.1 --cpu",
    "bert": noted.BERT,
}


class Count(TorchDispatchMode):
    """Counts the calls of operators by whether they take most of a layer's time."""

    def __init__(self) -> None:
        super().__init__()
        self.expensive = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in layerwise.EXPENSIVE:
            self.expensive += 1
        else:
            self.others += 1
        return func(*args, **(kwargs or {}))


def backward(flags: str, **policy: bool) -> tuple[list[Tensor | None], Count]:
    """The gradients of a model in training, and the operators of both passes."""
    model = runs.model_of(flags).train()
    if policy:
        layerwise.checkpoint_activations(model, **policy)
    torch.manual_seed(2)  # of dropout
    source = torch.randint(4, 600, (2, 16), generator=torch.Generator().manual_seed(1))
    with Count() as count:
        model(source)[0].square().mean().backward()
    return [p.grad for p in model.parameters()], count


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_stay_and_a_selective_policy_recomputes_no_product(family: str) -> None:
    flags = FAMILIES[family]
    expected, plain = backward(flags)
    for selective in (False, True):
        found, count = backward(flags, selective=selective)
        for gradient, wanted in zip(found, expected, strict=True):
            assert (gradient is None) == (wanted is None)
            if wanted is not None:
                torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)
        assert count.others > plain.others
        assert (count.expensive == plain.expensive) is selective
