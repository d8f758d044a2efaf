"""Cross entropy by kernels is that of torch, on whatever the compiler and the processor offer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.modules import dispatch
from fairseq.modules.output_layer import linear_cross_entropy

TYPES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize("words", [1, 15, 83, 5000])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_cross_entropy_and_its_gradients_are_those_of_torch_in_float64(dtype: torch.dtype, words: int) -> None:
    torch.manual_seed(1)
    hidden, weight, bias = (torch.randn(s).to(dtype) for s in ((37, 16), (words, 16), (words,)))
    target = torch.randint(words, (37,))
    ours, exact = (
        [t.clone().to(kind).requires_grad_() for t in (hidden, weight, bias)] for kind in (dtype, torch.double)
    )
    loss = linear_cross_entropy(*ours[:2], target, ours[2])
    expected = F.cross_entropy(F.linear(*exact), target, reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=TYPES[dtype], atol=0)
    loss.backward()
    expected.backward()
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=TYPES[dtype], atol=4 * TYPES[dtype])


def test_extreme_logits_have_a_finite_loss_and_invalid_ones_none() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    weight = logits.t().expand(3, 3).contiguous()
    assert float(linear_cross_entropy(torch.eye(3)[:1], weight, torch.tensor([1]))) == pytest.approx(2e4)
    assert linear_cross_entropy(torch.eye(3)[:1], weight * torch.nan, torch.tensor([1])).isnan()


@pytest.mark.parametrize("word", [-1, 3])
def test_a_target_outside_of_the_vocabulary_is_an_error(word: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        linear_cross_entropy(torch.eye(3), torch.eye(3), torch.tensor([0, word, 0]))


def test_a_chunk_of_bfloat16_is_not_widened() -> None:
    """Logits in float32 would be mapped from the system, and their pages cleared, anew in every
    chunk."""
    hidden, weight = torch.randn(64, 8).bfloat16(), torch.randn(500, 8).bfloat16().requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(hidden, weight, torch.randint(500, (64,)))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 64 * 500 * 4 or dispatch.compiled("cross_entropy") is None


@pytest.mark.parametrize("target", [torch.tensor([1, 2, 3]), torch.zeros(4, 1, dtype=torch.int64)])
def test_a_target_that_is_no_vector_of_the_rows_is_an_error(target: Tensor) -> None:
    by_kernel = dispatch.compiled("cross_entropy")
    if by_kernel is None:
        pytest.skip("no kernels")
    with pytest.raises(ValueError, match="expected one word for each of 4 rows"):
        by_kernel.cross_entropy(torch.zeros(4, 10), target, False)


def test_targets_of_other_integer_types_are_read_as_they_are() -> None:
    logits, target = torch.randn(4, 10), torch.tensor([9, 0, 3, 1])
    losses = [linear_cross_entropy(logits, torch.eye(10), target.to(kind), None) for kind in (torch.int64, torch.int32)]
    assert torch.equal(*losses)
