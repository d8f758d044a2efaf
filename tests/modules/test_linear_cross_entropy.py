"""Losses without logits equal those computed from the logits."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq.modules import linear
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax
from fairseq.modules.output_layer import LinearOutput, linear_cross_entropy, select_rows, target_log_probs

PAD = 1


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows, words", [(0, 7), (1, 7), (63, 20000), (64, 20000), (65, 20000), (200, 20000), (300, 5)])
def test_linear_cross_entropy_is_the_cross_entropy_with_its_gradients(rows, words, dtype):
    hidden = torch.randn(rows, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(words, 6, dtype=dtype, requires_grad=True)
    target = torch.randint(words, (rows,))
    loss = linear_cross_entropy(hidden, weight, target)
    (3 * loss).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = F.cross_entropy(exact[0] @ exact[1].t(), target, reduction="sum")
    (3 * expected).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=2e-4)


def test_linear_cross_entropy_is_the_same_in_several_chunks(monkeypatch):
    hidden, weight = torch.randn(300, 6, requires_grad=True), torch.randn(5000, 6, requires_grad=True)
    bias, target = torch.randn(5000, requires_grad=True), torch.randint(5000, (300,))
    found = []
    for elements in (1 << 30, 1):
        monkeypatch.setitem(linear_cross_entropy.__globals__, "_CHUNK_ELEMENTS", elements)
        loss = linear_cross_entropy(hidden, weight, target, bias)
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(one, several, rtol=1e-4, atol=1e-5)


def test_linear_cross_entropy_of_large_logits_is_finite():
    hidden = torch.tensor([[500.0], [-500.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0]))
    loss.backward()
    assert float(loss.detach()) == 1000.0 and torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_cross_entropy_under_autocast_is_close_and_sums_in_float32(dtype):
    hidden, weight = torch.randn(500, 16, requires_grad=True), (torch.randn(300, 16) / 4).requires_grad_()
    target = torch.randint(300, (500,))
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(hidden, weight, target)
    loss.backward()
    expected = F.cross_entropy(hidden.detach() @ weight.detach().t(), target, reduction="sum")
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-3)


def test_linear_cross_entropy_without_gradients():
    hidden, weight, target = torch.randn(9, 4), torch.randn(5, 4, requires_grad=True), torch.randint(5, (9,))
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, target).requires_grad
    linear_cross_entropy(hidden, weight, target).backward()
    assert weight.grad is not None


@pytest.mark.parametrize("chunk", [None, 1, 7, 100])
def test_target_log_probs_are_those_of_the_softmax(chunk):
    hidden, weight, target = torch.randn(20, 4), torch.randn(11, 4), torch.randint(11, (20,))
    expected = (hidden @ weight.t()).log_softmax(-1)[torch.arange(20), target]
    logits = partial(torch.nn.functional.linear, weight=weight)
    torch.testing.assert_close(target_log_probs(hidden, logits, len(weight), target, chunk), expected)
    assert target_log_probs(hidden[:0], logits, len(weight), target[:0], chunk).shape == (0,)


def test_plain_output_leaves_padding_out():
    layer, hidden = LinearOutput(torch.nn.Parameter(torch.randn(9, 4))), torch.randn(6, 4)
    target = torch.tensor([3, PAD, 8, 0, PAD, 2])
    expected = F.cross_entropy(hidden @ layer.weight.t(), target, ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(layer.loss(hidden, layer.partition(target, PAD)), expected)
    torch.testing.assert_close(layer.log_probs(hidden).exp().sum(-1), torch.ones(6))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("words", [50, 20_000])
@pytest.mark.parametrize("onednn", [False, True])
def test_rows_without_a_target_add_nothing(
    rows: int, words: int, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products by oneDNN, those in lower precision among them, have some, so that numbers of rows
    are few."""
    monkeypatch.setattr(linear, "_is_faster", lambda: onednn)
    torch.manual_seed(3)
    weight, bias, states = torch.randn(words, 8) / 8, torch.randn(words), torch.randn(400, 8)
    chosen, target = torch.randperm(400)[:rows], torch.randint(words, (rows,))
    results = []
    for lower in (False, True):
        learned = [t.clone().requires_grad_() for t in (states, weight, bias)]
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            some = select_rows(learned[0], chosen)
            assert len(some) == (math.ceil(rows / 64) * 64 if lower or onednn else rows)
            loss = linear_cross_entropy(some, learned[1], target, learned[2])
            with torch.no_grad():
                scores = target_log_probs(some, lambda h: F.linear(h, weight, bias), words, target)
        loss.backward()
        results.append([loss, scores, *(t.grad for t in learned)])
    learned = [t.clone().requires_grad_() for t in (states, weight, bias)]
    exact = F.cross_entropy(F.linear(learned[0][chosen], *learned[1:]), target, reduction="none")
    exact.sum().backward()
    for full, expected in zip(results[0], [exact.sum(), -exact, *(t.grad for t in learned)], strict=True):
        torch.testing.assert_close(full, expected, rtol=1e-4, atol=1e-5)
    for full, low in zip(*results, strict=True):
        torch.testing.assert_close(low.float(), full, rtol=5e-2, atol=5e-2)


def test_states_without_a_target_that_were_not_made_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected one word for each of 70 hidden states"):
        linear_cross_entropy(torch.randn(70, 8), torch.randn(9, 8), torch.zeros(6, dtype=torch.int64))


def test_numbers_of_rows_of_tail_bands_are_few_in_bfloat16() -> None:
    """oneDNN compiles kernels for each number of rows: for each batch, if it is that of the band's
    words."""
    layer = AdaptiveSoftmax(3000, 32, [1000, 2000])
    seen = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                seen.add(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    for seed in range(12):
        torch.manual_seed(seed)
        hidden, target = torch.randn(256, 32), torch.randint(3000, (256,))
        with Products(), torch.autocast("cpu", torch.bfloat16):
            layer.loss(hidden, layer.partition(target, padding_idx=1)).backward()
    assert len(seen) < 20
