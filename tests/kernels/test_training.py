"""Kernels of training compute what torch's operators do, on whatever the compiler and the processor
offer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import runs
import torch
import torch.nn.functional as F
from dropout_masks import mask_of
from torch import Tensor

from fairseq.kernels import arguments, build
from fairseq.kernels import training as fused
from fairseq.modules.dropout import add_dropout, dropout, relu_dropout
from fairseq.modules.output_layer import linear_cross_entropy

TYPES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (31,), (3, 32), (2, 5, 77), (9, 1000), (15, 9001)], ids=str)
def test_dropouts_and_their_gradients_are_those_of_torch_in_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    factors = mask_of(0.3, shape)
    x, residual, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    cases: list[tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = [
        (lambda a, b: dropout(a, 0.3) + 0 * b, lambda a, b: a * factors + 0 * b),
        (lambda a, b: relu_dropout(a, 0.3) + 0 * b, lambda a, b: a.relu() * factors + 0 * b),
        (lambda a, b: add_dropout(b, a, 0.3), lambda a, b: b + a * factors),
    ]
    for computed, expected in cases:
        ours = [t.clone().requires_grad_() for t in (x, residual)]
        exact = [t.double().requires_grad_() for t in (x, residual)]
        torch.manual_seed(7)
        found, wanted = computed(*ours), expected(*exact)
        found.backward(grad)
        wanted.backward(grad.double())
        for a, b in [(found, wanted), *((o.grad, e.grad) for o, e in zip(ours, exact, strict=True))]:
            assert a is not None and b is not None
            torch.testing.assert_close(a.double(), b, rtol=TYPES[dtype], atol=2 * TYPES[dtype])


def test_on_gpus_a_relu_with_dropout_has_the_gradient_of_what_torch_kept() -> None:
    x, grad = torch.randn(40, 50, requires_grad=True), torch.randn(40, 50)
    y = fused._ReLUDropout.apply(x, None, 0.3)
    y.backward(grad)
    assert 0.25 < float((y > 0).float().mean()) < 0.45  # half of 70%
    torch.testing.assert_close(y, torch.where(y > 0, x / 0.7, 0.0))
    torch.testing.assert_close(x.grad, torch.where(y > 0, grad / 0.7, 0.0))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_on_gpus_a_residual_is_added_to_what_dropout_kept_and_gets_the_whole_gradient(dtype: torch.dtype) -> None:
    residual, x, grad = (torch.randn(40, 50, dtype=dtype).requires_grad_() for _ in range(3))
    y = fused._AddDropout.apply(residual, x, 0.3)
    y.backward(grad)
    assert x.grad is not None and torch.equal(residual.grad, grad)
    kept = x.grad != 0
    assert 0.6 < float(kept.float().mean()) < 0.8
    expected = residual.double() + torch.where(kept, x.double() / 0.7, 0.0)
    torch.testing.assert_close(y.double(), expected, rtol=TYPES[dtype], atol=2 * TYPES[dtype])
    torch.testing.assert_close(x.grad, torch.where(kept, grad / 0.7, 0.0))


@pytest.mark.parametrize("rows", [1, 33])
def test_masks_do_not_depend_on_the_number_of_threads(rows: int) -> None:
    x, threads = torch.ones(rows, 4100), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            torch.manual_seed(3)
            results.append(dropout(x, 0.4))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results)


def test_a_mask_takes_a_bit_an_element() -> None:
    x = torch.randn(4096, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(x, 0.1)
    assert fused.kernels(x) is None or sum(t.nbytes for t in saved) == 4096 // 8 + 8


def test_threads_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "LEAST_WORK", 1)
    x, threads = torch.randn(64, 1000), torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        torch.manual_seed(1)
        results.append(torch.stack([dropout(x, 0.2), relu_dropout(x, 0.2), add_dropout(x, x, 0.2)]))
    torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_a_run_without_kernels_is_the_same_run(tmp_path: Path, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine == "no compiler":
        pytest.skip("compared with the others")
    flags = [runs.SHORTFORMER, runs.DROPOUT, "--max-update 6 --disable-validation"]
    logs = [runs.updates(runs.train(tmp_path / "with", *flags))]
    with monkeypatch.context() as patch:
        patch.setattr(build, "library", lambda *arguments: None)
        logs.append(runs.updates(runs.train(tmp_path / "without", *flags)))
    assert len(logs[0]) == 6
    for line, other in zip(*logs, strict=True):
        assert (line["loss"], line["gnorm"]) == pytest.approx((other["loss"], other["gnorm"]), rel=1e-4)


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


@pytest.mark.parametrize("columns", [5, 300])
def test_sums_over_many_rows_are_those_in_float64(columns: int) -> None:
    x = torch.rand(50_000, columns)
    sums = torch.zeros(columns)
    fused.add_column_sums_(sums, x)
    torch.testing.assert_close(sums.double(), x.double().sum(0), rtol=3e-7, atol=0)


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
    assert largest < 64 * 500 * 4 or fused.kernels(weight) is None


@pytest.mark.parametrize("target", [torch.tensor([1, 2, 3]), torch.zeros(4, 1, dtype=torch.int64)])
def test_a_target_that_is_no_vector_of_the_rows_is_an_error(target: Tensor) -> None:
    if fused.kernels(torch.zeros(4, 10)) is None:
        pytest.skip("no kernels")
    with pytest.raises(ValueError, match="expected one word for each of 4 rows"):
        fused.cross_entropy(torch.zeros(4, 10), target, False)


def test_targets_of_other_integer_types_are_read_as_they_are() -> None:
    logits, target = torch.randn(4, 10), torch.tensor([9, 0, 3, 1])
    losses = [linear_cross_entropy(logits, torch.eye(10), target.to(kind), None) for kind in (torch.int64, torch.int32)]
    assert torch.equal(*losses)


def test_all_elements_are_dropped_at_probability_one() -> None:
    x = torch.ones(1000)
    assert not dropout(x, 1.0).any() and torch.equal(add_dropout(x, x, 1.0), x)
    assert not relu_dropout(x, 1.0).any()


def test_another_default_device_does_not_hold_masks() -> None:
    x = torch.ones(1000)
    with torch.device("meta"):
        assert dropout(x, 0.5).device.type == "cpu"
