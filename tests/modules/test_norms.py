"""RMS norm and rotary positions, and their gradients, are those of float64, on whatever the
compiler and the processor offer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fairseq.modules.norms import RMSNorm
from fairseq.modules.positions import Rotation, rotated

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
def test_norms_and_their_gradients_are_those_of_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    check(norm, naive_norm, [4 * torch.randn(shape).to(dtype), torch.randn(shape[-1])], dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dim", [6, 7, 40])
def test_rotations_are_products_of_complex_numbers(dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for x in (torch.randn(2, 3, 7, dim), torch.randn(2, 7, 3, dim).transpose(1, 2)):
        check(lambda y: rotated(y, TABLE), lambda y: naive_rotation(y, TABLE.double()), [x.to(dtype)], dtype)


def test_a_frozen_gain_has_no_gradient() -> None:
    x, gain = torch.randn(4, 6, requires_grad=True), torch.ones(6)
    norm(x, gain).sum().backward()
    assert gain.grad is None and x.grad is not None


def test_a_table_of_other_positions_is_an_error() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        rotated(torch.randn(1, 1, 4, 6), TABLE)
