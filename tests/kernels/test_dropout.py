"""Dropout by kernels is that of torch, on whatever the compiler and the processor offer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dropout_masks import mask_of
from torch import Tensor

from fairseq.kernels import arguments
from fairseq.modules import dispatch
from fairseq.modules.dropout import add_dropout, dropout, relu_dropout

TYPES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
pytestmark = pytest.mark.usefixtures("machine")


def no_kernels() -> bool:
    return dispatch.compiled("dropout") is None


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (31,), (3, 32), (2, 5, 77), (9, 1000), (15, 9001)], ids=str)
def test_dropout_and_its_gradient_are_products_with_a_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if no_kernels():
        pytest.skip("torch draws other masks")
    torch.manual_seed(7)
    factors = mask_of(0.3, shape)
    x, residual, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = [
        (lambda a, b: dropout(a, 0.3) + b, lambda a, b: a * factors + b),
        (lambda a, b: relu_dropout(a, 0.3) + b, lambda a, b: a.relu() * factors + b),
        (lambda a, b: add_dropout(b, a, 0.3), lambda a, b: a * factors + b),
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


def test_the_rate_is_that_asked_for_and_the_expectation_the_input() -> None:
    x = torch.ones(1 << 16)
    for p in (0.1, 0.5, 0.9):
        y = dropout(x, p)
        assert float((y == 0).float().mean()) == pytest.approx(p, abs=0.01)
        assert float(y.mean()) == pytest.approx(1, abs=0.03)


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
    assert no_kernels() or sum(t.nbytes for t in saved) == 4096 // 8 + 8


def test_threads_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "LEAST_WORK", 1)
    x, threads = torch.randn(64, 1000), torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        torch.manual_seed(1)
        results.append(dropout(x, 0.2))
    torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_all_elements_are_dropped_at_probability_one() -> None:
    assert not dropout(torch.ones(1000), 1.0).any()


def test_another_default_device_does_not_hold_masks() -> None:
    x = torch.ones(1000)
    with torch.device("meta"):
        assert dropout(x, 0.5).device.type == "cpu"
