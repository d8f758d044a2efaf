"""Kernels of layers compute what torch's operators do, on whatever the compiler and the processor
offer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.kernels import arguments, layers
from fairseq.modules.positions import Rotation, rotated
from fairseq.modules.transformer_layer import RMSNorm, silu_product

TYPES = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2}
TABLE = Rotation(6).table(7, torch.device("cpu"))
Function = Callable[..., Tensor]
pytestmark = pytest.mark.usefixtures("machine")


def norm(x: Tensor, gain: Tensor) -> Tensor:
    module = RMSNorm(x.size(-1), eps=1e-5)
    del module.weight
    module.weight = gain  # type: ignore[assignment]
    return module(x)


def naive_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain


def naive_rotation(x: Tensor, table: Tensor) -> Tensor:
    """Products of complex numbers."""
    half = table.size(2)
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(table[:, 0], table[:, 1])
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)


def check(ours: Function, exact: Function, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Results and gradients of *ours* are those of *exact* in float64."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    doubles = [x.double().requires_grad_() for x in inputs]
    found, wanted = ours(*leaves), exact(*doubles)
    grad = torch.randn(found.shape).to(dtype)
    assert found.dtype == dtype
    found.backward(grad)
    wanted.backward(grad.double())
    for a, b in [(found, wanted), *((x.grad, y.grad) for x, y in zip(leaves, doubles, strict=True))]:
        assert a is not None and b is not None
        torch.testing.assert_close(a.double(), b, rtol=TYPES[dtype], atol=4 * TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 64), (70, 33)], ids=str)
def test_norms_and_gates_and_their_gradients_are_those_of_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, other = (4 * torch.randn(shape).to(dtype) for _ in range(2))
    check(norm, naive_norm, [x, torch.randn(shape[-1])], dtype)
    check(silu_product, lambda a, b: a * a.sigmoid() * b, [x, other], dtype)
    wide = torch.tensor([-200.0, -80.0, 0.0, 80.0, 200.0]).to(dtype)
    check(silu_product, lambda a, b: a * a.sigmoid() * b, [wide, torch.ones_like(wide)], dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dim", [6, 7, 40])
def test_rotations_are_products_of_complex_numbers(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for x in (torch.randn(2, 3, 7, dim), torch.randn(2, 7, 3, dim).transpose(1, 2)):
        check(lambda y: rotated(y, TABLE), lambda y: naive_rotation(y, TABLE.double()), [x.to(dtype)], dtype)


def test_second_derivatives_are_those_of_float64() -> None:
    x, other, gain = torch.randn(3, 6), torch.randn(3, 6), torch.randn(6)

    def second(product: Function, normed: Function, turned: Function, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        a, b, g = (y.clone().requires_grad_() for y in inputs)
        y = turned(product(normed(a, g), b)[:, None, None].expand(3, 1, 7, 6))
        first = torch.autograd.grad(y.square().sum(), (a, b, g), create_graph=True)
        return torch.autograd.grad(sum((f.square().sum() for f in first), torch.zeros(())), (a, b, g))

    found = second(silu_product, norm, lambda y: rotated(y, TABLE), [x, other, gain])
    doubles = [x.double(), other.double(), gain.double()]
    exact = lambda y: naive_rotation(y, TABLE.double())  # noqa: E731
    wanted = second(lambda a, b: F.silu(a) * b, naive_norm, exact, doubles)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_threads_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "LEAST_WORK", 1)
    results, threads = [], torch.get_num_threads()
    x, gain = torch.randn(80, 48), torch.randn(48)
    for count in (1, 3):
        torch.set_num_threads(count)
        a, g = x.clone().requires_grad_(), gain.clone().requires_grad_()
        y = silu_product(norm(a, g), a)
        results.append([y, *torch.autograd.grad(y.sum(), (a, g))])
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


def test_a_frozen_gain_and_tensors_that_kernels_do_not_read_are_left_to_torch(machine: str) -> None:
    x, gain = torch.randn(4, 6, requires_grad=True), torch.ones(6)
    norm(x, gain).sum().backward()
    assert gain.grad is None and x.grad is not None
    assert layers.silu_product(x.double(), x.double()) is None and layers.rms_norm(x, gain[:3], 1e-5) is None
    assert layers.rotated(x[None, None], TABLE) is None  # of other positions
    assert (layers.silu_product(x, x) is None) == (machine == "no compiler")
