"""Kernels of training: they compute what torch's operators do, on whatever the compiler and the processor offer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.modules import fused, native
from fairseq.modules.dropout import add_dropout, dropout, relu_dropout, softmax_dropout
from fairseq.modules.output_layer import linear_cross_entropy

SOURCE = Path(fused.__file__).with_name("fused.c")
COMPILED = native.library("training", SOURCE) is not None
SHAPES = [(1,), (31,), (3, 32), (2, 5, 77)]
TYPES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
PLAIN = "-mno-avx512f"  # nothing of AVX-512, bfloat16 included


@pytest.fixture(params=["compiled", "compiled without AVX-512", "no compiler"], autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What this machine is taken for."""
    if request.param == "no compiler":
        monkeypatch.setenv("CC", "/nowhere/cc")
    elif not COMPILED:
        pytest.skip("no C compiler")
    elif "without" in request.param:
        monkeypatch.setenv("CFLAGS", PLAIN)
    native.library.cache_clear()
    yield request.param
    assert (native.library("training", SOURCE) is None) == (request.param == "no compiler")
    native.library.cache_clear()


def test_several_libraries_are_loaded_in_one_process(machine: str, tmp_path: Path) -> None:
    if machine != "compiled":
        pytest.skip("once is enough")
    for number in range(2):
        source = tmp_path / f"{number}.c"
        source.write_text(f"int number(void) {{ return {number}; }}")
        library = native.library("testing", source)
        assert library is not None and library.number() == number


def mask_of(p: float, shape: tuple[int, ...], seed: int) -> Tensor:
    """The factors of a dropout that torch's generator in the state of *seed* draws, in float64."""
    torch.manual_seed(seed)
    mask = fused.Mask.draw(p)
    return mask.keeps(torch.Size(shape)).double() * mask.scale


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_torch_in_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    factors = mask_of(0.3, shape, 7)
    cases = [
        (lambda a, b: dropout(a, 0.3) + 0 * b, lambda a, b: a * factors + 0 * b),
        (lambda a, b: relu_dropout(a, 0.3) + 0 * b, lambda a, b: a.relu() * factors + 0 * b),
        (lambda a, b: add_dropout(b, a, 0.3), lambda a, b: b + a * factors),
        (lambda a, b: softmax_dropout(a, 0.3) + 0 * b, lambda a, b: a.softmax(-1) * factors + 0 * b),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_and_its_gradients_are_those_of_torch_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden, weight, bias = (torch.randn(s).to(dtype) for s in ((37, 16), (83, 16), (83,)))
    target = torch.randint(83, (37,))
    ours, exact = (
        [t.clone().to(kind).requires_grad_() for t in (hidden, weight, bias)] for kind in (dtype, torch.double)
    )
    found = linear_cross_entropy(*ours[:2], target, ours[2])
    wanted = F.cross_entropy(F.linear(*exact), target, reduction="sum")
    torch.testing.assert_close(found.double(), wanted, rtol=TYPES[dtype], atol=0)
    found.backward()
    wanted.backward()
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=TYPES[dtype], atol=4 * TYPES[dtype])


def test_hidden_scores_have_no_probability_and_extreme_logits_a_finite_loss() -> None:
    scores = torch.full((2, 40), float("-inf"))
    scores[:, :3] = torch.tensor([1.0, 90.0, -90.0])
    probabilities, _ = fused.softmax_drop(scores, fused.Mask(0, 0))
    torch.testing.assert_close(probabilities, scores.softmax(-1))
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    loss = linear_cross_entropy(torch.eye(3)[:1], logits.t().expand(3, 3).contiguous(), torch.tensor([1]))
    assert float(loss) == pytest.approx(2e4)


def test_threads_change_no_number() -> None:
    x, threads = torch.randn(64, 100), torch.get_num_threads()
    masks = []
    for count in (1, 2):
        torch.set_num_threads(count)
        masks.append(fused.drop(x, x, fused.Mask(5, 9000)))
    torch.set_num_threads(threads)
    assert torch.equal(*masks)


def test_masks_of_two_seeds_and_of_two_rows_are_independent() -> None:
    shape = torch.Size((64, 4096))
    first, second = (fused.Mask(seed, 1 << 15).keeps(shape).double() - 0.5 for seed in (1, 2))
    for a, b in (
        (first, second),
        (first[1:], first[:-1]),
        (first[:, 1:], first[:, :-1]),
        (first[:, 16:], first[:, :-16]),
    ):
        assert abs(float((a * b).mean())) < 0.25 * 6 / a.numel() ** 0.5


ADDRESSES = r"""
#include <stdlib.h>
#include "FUSED"
int main(void) {
    const Dropout dropout = {12345, 20000, 1.5f};
    for (long type = 0; type < 3; type++)
        for (long columns = 1; columns < 70; columns++) {
            const long rows = 3, size = rows * columns * (type ? 2 : 4);
            char *a = calloc(size, 1), *b = calloc(size, 1), *c = calloc(size, 1);
            int64_t *targets = calloc(rows, 8);
            float *losses = calloc(rows, 4);
            targets[1] = columns - 1;
            drop(type, a, b, c, rows, columns, &dropout, 0, 2);
            drop(type, a, NULL, c, rows, columns, &dropout, 1, 2);
            softmax_drop(type, a, b, c, rows, columns, &dropout, 2);
            softmax_drop_gradient(type, a, b, c, rows, columns, &dropout, 2);
            cross_entropy(type, a, targets, losses, rows, columns, 1, 2);
            free(a), free(b), free(c), free(targets), free(losses);
        }
}
"""


def test_the_address_sanitizer_finds_nothing(tmp_path: Path, machine: str) -> None:
    if machine != "compiled":
        pytest.skip("once is enough")
    (tmp_path / "main.c").write_text(ADDRESSES.replace("FUSED", str(SOURCE)))
    command = [*os.environ.get("CC", "cc").split(), "-O1", "-march=native", "-fsanitize=address,undefined", "-w"]
    built = subprocess.run([*command, tmp_path / "main.c", "-o", tmp_path / "main", "-lm"], capture_output=True)
    if built.returncode:
        pytest.skip("the compiler has no address sanitizer")
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
