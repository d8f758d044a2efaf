"""What the kernels of attention take, write and refuse; torch computes what they refuse."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fairseq.kernels import attention as kernel
from fairseq.modules import dispatch
from fairseq.modules.attention import AttentionMask, attend

SOURCE = Path(kernel.__file__).with_name("attention.c")

pytestmark = pytest.mark.usefixtures("machine")


def test_there_are_two_pieces_at_most() -> None:
    x = torch.randn(2, 3, 6, 8, requires_grad=True)
    three = [x[:, :, :1], x[:, :, 1:4], x[:, :, 4:]]
    assert not kernel.computes(x, three, three, 0.0)
    torch.testing.assert_close(attend(x, three, three), attend(x, [x], [x]))


class Wrapped(Tensor):
    """A tensor whose elements may be elsewhere, as those of distributed tensors."""


UNREADABLE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.as_subclass(Wrapped),
    Tensor.double,
    lambda x: x.to("meta"),
    lambda x: x[:0],
]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("change", UNREADABLE)
def test_tensors_that_kernels_cannot_read_are_left_to_torch(number: int, change: Callable[[Tensor], Tensor]) -> None:
    tensors = [torch.randn(2, 3, 6, 8) for _ in range(3)]
    found = dispatch.kernels("attention", *tensors)
    assert found is dispatch.compiled("attention")
    tensors[number] = change(tensors[number])
    assert dispatch.kernels("attention", *tensors) is None


def test_the_structure_of_a_problem_is_the_kernels_own() -> None:
    compiled = kernel.compiled()
    if compiled is not None:
        assert compiled.attention_size() == ctypes.sizeof(kernel.Problem)
    described = re.search(r"typedef struct \{([^{}]*)\} Attention;", SOURCE.read_text())
    assert described is not None
    members = re.sub(r"/\*.*?\*/", "", described[1])
    names = [re.sub(r"\[\d+\]", "", part).split()[-1].lstrip("*") for part in re.split("[,;]", members) if part.strip()]
    assert names == [name for name, _ in kernel.Problem._fields_]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x[:, :1], lambda x: x[..., :7], lambda x: x[0]])
def test_shapes_that_do_not_agree_are_left_to_torch(number: int, change: Callable[[Tensor], Tensor]) -> None:
    """The kernel reads at addresses: keys that torch would broadcast, or refuse, are other
    memory."""
    tensors = [torch.randn(2, 3, 6, 8) for _ in range(4)]
    tensors[number] = change(tensors[number])
    query, distance, key, value = tensors
    assert not kernel.computes(query, [key], [value], 0.0, distance, torch.randn(3, 6, 8))
    if number != 1:
        assert not kernel.computes(query, [key], [value], 0.0)
    assert not kernel.computes(torch.randn(2, 3, 6, 8), [key], [value[:, :, :5]], 0.0)


def test_another_default_device_does_not_hold_what_kernels_write() -> None:
    query = torch.randn(2, 3, 10, 8, requires_grad=True)
    with torch.device("meta"):
        attend(query, [query], [query]).sum().backward()
    assert query.grad is not None and query.grad.isfinite().all()


@pytest.mark.parametrize("trains", [False, True])
def test_probabilities_are_written_where_something_is_trained(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    query, run, written = torch.randn(2, 3, 64, 8, requires_grad=trains), kernel._run, []

    def record(name: str, problem: kernel.Problem) -> None:
        written.append(problem.probabilities is not None)
        run(name, problem)

    monkeypatch.setattr(kernel, "_run", record)
    attend(query, [query], [query])
    assert written == ([] if dispatch.compiled("attention") is None else [trains])


class Learned(AttentionMask):
    """A bias that is trained."""

    def __init__(self) -> None:
        self.weight = torch.zeros(6, 6, requires_grad=True)

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        return self.weight


def test_a_bias_that_is_trained_is_left_to_torch() -> None:
    query, visible = torch.randn(2, 3, 6, 8), Learned()
    attend(query, [query], [query], visible).square().sum().backward()
    assert visible.weight.grad is not None and visible.weight.grad.any()
    with pytest.raises(ValueError, match="no gradient of a bias"):
        kernel.attention(query, [query], [query], visible.weight, 0.0)
