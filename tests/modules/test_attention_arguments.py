"""What the kernels of attention take, write and refuse; torch computes what they refuse."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fairseq.modules import fused_attention
from fairseq.modules.attention import attend
from fairseq.modules.native import library

SOURCE = Path(fused_attention.__file__).with_name("attention.c")

pytestmark = pytest.mark.usefixtures("machine")


def test_there_are_two_pieces_at_most() -> None:
    x = torch.randn(2, 3, 6, 8, requires_grad=True)
    three = [x[:, :, :1], x[:, :, 1:4], x[:, :, 4:]]
    assert fused_attention.attention(x, three, three, None, 0.0, causal=True) is None
    torch.testing.assert_close(attend(x, three, three), attend(x, [x], [x]))


class Wrapped(Tensor):
    """A tensor whose elements may be elsewhere, as those of distributed tensors."""


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("change", [lambda x: x.as_subclass(Wrapped), Tensor.double, lambda x: x.to("meta")])
def test_attention_of_any_tensor_without_a_kernel_is_left_to_torch(
    number: int, change: Callable[[Tensor], Tensor]
) -> None:
    tensors = [torch.randn(2, 3, length, 8) for length in (6, 6, 4, 6, 4, 6)] + [torch.randn(3, 10, 8)]
    tensors[number] = change(tensors[number])
    content, distance, *parts, table = tensors
    assert fused_attention.relative_attention(content, distance, parts[:2], parts[2:], table, None, 0.1) is None
    tensors = [torch.randn(2, 3, length, 8) for length in (6, 4, 6, 4, 6)]
    tensors[number % 5] = change(tensors[number % 5])
    query, *parts = tensors
    assert fused_attention.attention(query, parts[:2], parts[2:], None, 0.1) is None


def test_the_structure_of_a_problem_is_the_kernels_own() -> None:
    compiled = library("training", SOURCE)
    if compiled is not None:
        assert compiled.attention_size() == ctypes.sizeof(fused_attention.Problem)
    described = re.search(r"typedef struct \{([^{}]*)\} Attention;", SOURCE.read_text())
    assert described is not None
    members = re.sub(r"/\*.*?\*/", "", described[1])
    names = [re.sub(r"\[\d+\]", "", part).split()[-1].lstrip("*") for part in re.split("[,;]", members) if part.strip()]
    assert names == [name for name, _ in fused_attention.Problem._fields_]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x[:, :1], lambda x: x[..., :7], lambda x: x[0]])
def test_shapes_that_do_not_agree_are_left_to_torch(number: int, change: Callable[[Tensor], Tensor]) -> None:
    """The kernel reads at addresses: keys that torch would broadcast, or refuse, are other memory."""
    tensors = [torch.randn(2, 3, 6, 8) for _ in range(4)]
    tensors[number] = change(tensors[number])
    query, distance, key, value = tensors
    assert fused_attention.relative_attention(query, distance, [key], [value], torch.randn(3, 6, 8), None, 0.0) is None
    if number != 1:
        assert fused_attention.attention(query, [key], [value], None, 0.0) is None
    assert fused_attention.attention(torch.randn(2, 3, 6, 8), [key], [value[:, :, :5]], None, 0.0) is None


def test_another_default_device_does_not_hold_what_kernels_write() -> None:
    query = torch.randn(2, 3, 10, 8, requires_grad=True)
    with torch.device("meta"):
        attend(query, [query], [query]).sum().backward()
    assert query.grad is not None and query.grad.isfinite().all()


@pytest.mark.parametrize("trains", [False, True])
def test_probabilities_are_written_where_something_is_trained(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    query, call, written = torch.randn(2, 3, 64, 8, requires_grad=trains), fused_attention.call, []

    def record(kernel: str, problem: fused_attention.Problem) -> None:
        written.append(problem.probabilities is not None)
        call(kernel, problem)

    monkeypatch.setattr(fused_attention, "call", record)
    attended = fused_attention.attention(query, [query], [query], None, 0.0)
    assert written == ([] if attended is None else [trains])


def test_a_bias_that_is_trained_is_left_to_torch() -> None:
    query = torch.randn(2, 3, 6, 8)
    assert fused_attention.attention(query, [query], [query], torch.zeros(6, 6, requires_grad=True), 0.0) is None
