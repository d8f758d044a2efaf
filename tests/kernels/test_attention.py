"""Attention by kernels is a softmax written out in float64, on whatever the compiler and the
processor offer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from dropout_masks import mask_of
from torch import Tensor

from fairseq.kernels import attention as kernel
from fairseq.modules import dispatch
from fairseq.modules.attention import CAUSAL, AttentionMask, Bidirectional, Causal, attend, concat_chunks
from fairseq.modules.relative_attention import (
    Distances,
    RelativeAttention,
    RelativePositions,
    attend_by_distance,
    shift,
)

SOURCE = Path(kernel.__file__).with_name("attention.c")
TYPES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=str)


def no_kernels() -> bool:
    return dispatch.compiled("attention") is None


def is_by_kernel(attended: Tensor) -> bool:
    """Whether the kernel computed it; its result is a view with heads before time."""
    node = attended.grad_fn
    return node is not None and any("fairseq_attention" in str(other) for other, _ in ((node, 0), *node.next_functions))


pytestmark = pytest.mark.usefixtures("machine")

# Rows, heads, queries, keys, channels of a head, keys of the memory: masks whose heads begin within
# a byte, channels and keys that fill no vectors, keys for which queries are computed in groups, and
# so many that a group is the least.
SHAPES = [
    *(
        (2, 6, 5, 9, 16, 0),
        (2, 3, 5, 9, 16, 4),
        (1, 2, 128, 256, 64, 128),
        (3, 2, 70, 131, 41, 61),
        (2, 3, 1, 40, 16, 0),
    ),
    *((2, 4, 1, 7, 3, 0), (1, 1, 100, 100, 64, 0), (2, 2, 33, 33, 40, 0), (1, 2, 150, 700, 24, 550)),
    *((2, 3, 1, 1, 5, 0), (1, 2, 3, 9001, 8, 8000), (2, 2, 21, 32, 17, 31), (3, 2, 7, 70, 1, 20)),
]


def attend_relative(
    content: Tensor,
    distance: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    table: Tensor,
    bias: Tensor | None = None,
    p: float = 0.0,
) -> Tensor:
    """Relative attention as modules compute it, by kernels where there are any."""
    if not no_kernels():
        assert kernel.computes(content, keys, values, p, distance, table)
        return kernel.relative_attention(content, distance, keys, values, table, bias, p)
    hidden = CAUSAL.bias(content.size(2), table.size(1), content.device, content.dtype) if bias is None else bias
    joined = concat_chunks(keys), concat_chunks(values)
    return attend_by_distance(content, distance, *joined, Distances(table), hidden, p)


def pieces(x: Tensor, memory: int) -> list[Tensor]:
    """The heads of *x* [B, S, H, D] of a memory and a segment."""
    heads = x.transpose(1, 2)
    return [heads[:, :, :memory], heads[:, :, memory:]] if memory else [heads]


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Random numbers, and equal ones in float64."""
    drawn = [torch.randn(shape).to(dtype) for shape in shapes]
    ours, exact = ([x.to(kind, copy=True).requires_grad_() for x in drawn] for kind in (dtype, torch.double))
    return ours, exact


def assert_equal(results: list[tuple[Tensor | None, Tensor | None]], dtype: torch.dtype) -> None:
    """Of each pair the numbers agree, and the whole to a few units of its precision."""
    for ours, exact in results:
        assert ours is not None and exact is not None
        tolerance = 2 * TYPES[dtype]
        torch.testing.assert_close(
            ours.double(), exact, rtol=tolerance, atol=tolerance * max(1, float(exact.detach().abs().max()))
        )
        # A gradient of 0 is a sum of terms of size 1 that cancel, up to their rounding.
        scale = max(1e-3, float(exact.detach().norm()) or 1.0)
        assert (ours.double() - exact).norm() <= tolerance * scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_its_gradients_are_those_of_torch_in_float64(shape: tuple[int, ...]) -> None:
    for kind, p, dtype in product(("causal", "window", "padding", "bidirectional"), (0.0, 0.3), TYPES):
        check_attention(shape, kind, p, dtype)


def check_attention(shape: tuple[int, ...], kind: str, p: float, dtype: torch.dtype) -> None:
    rows, heads, queries, keys, dim, memory = shape
    lengths = torch.tensor([keys - keys // 4, keys - keys // 8, keys])[:rows, None]
    seen: AttentionMask = {
        "causal": CAUSAL,
        "window": Causal(window=3),
        "padding": Bidirectional(torch.arange(keys) >= lengths),
        "bidirectional": Bidirectional(),
    }[kind]
    torch.manual_seed(1)
    ours, exact = leaves(dtype, *((rows, length, heads, dim) for length in (queries, keys, keys)))
    grad = torch.randn(rows, heads, queries, dim).to(dtype)
    if p and no_kernels():
        return  # torch draws other masks
    torch.manual_seed(7)
    factors = mask_of(p, (rows, heads, queries, keys)) if p else torch.ones(())
    torch.manual_seed(7)
    attended = attend(ours[0].transpose(1, 2), pieces(ours[1], memory), pieces(ours[2], memory), seen, p)
    by_kernel = is_by_kernel(attended)
    assert by_kernel == (not no_kernels())
    query, key, value = (x.transpose(1, 2) for x in exact)
    scores = query @ key.transpose(2, 3) / math.sqrt(dim)
    bias = seen.bias(queries, keys, grad.device)
    expected = ((scores if bias is None else scores + bias.double()).softmax(-1) * factors) @ value
    attended.backward(grad)
    expected.backward(grad.double())
    assert_equal([(attended, expected), *((o.grad, e.grad) for o, e in zip(ours, exact, strict=True))], dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_relative_attention_and_its_gradients_are_those_of_torch_in_float64(shape: tuple[int, ...]) -> None:
    for window, p, dtype in product((None, 3), (0.0, 0.3), TYPES):
        check_relative_attention(shape, window, p, dtype)


def check_relative_attention(shape: tuple[int, ...], window: int | None, p: float, dtype: torch.dtype) -> None:
    """The score of key j for query i is the content's plus the distance's, column T − 1 − i + j of
    the products."""
    rows, heads, queries, keys, dim, memory = shape
    torch.manual_seed(1)
    lengths = (queries, queries, keys, keys)
    ours, exact = leaves(dtype, *((rows, length, heads, dim) for length in lengths), (heads, keys, dim))
    for leaf in (*ours[:3], *exact[:3]):
        leaf.data /= 2  # powers of two, which round nothing
    grad = torch.randn(rows, heads, queries, dim).to(dtype)
    bias = Causal(window).bias(queries, keys, grad.device)
    if p and no_kernels():
        return  # torch draws other masks
    torch.manual_seed(7)
    factors = mask_of(p, (rows, heads, queries, keys)) if p else torch.ones(())
    torch.manual_seed(7)
    content, distance = (x.transpose(1, 2) for x in ours[:2])
    added = None if window is None or bias is None else bias.to(dtype)
    attended = attend_relative(content, distance, pieces(ours[2], memory), pieces(ours[3], memory), ours[4], added, p)
    content, distance, key, value = (x.transpose(1, 2) for x in exact[:4])
    by_distance = distance @ exact[4].transpose(1, 2)
    columns = (torch.arange(keys) + queries - 1 - torch.arange(queries)[:, None]).clamp(max=keys - 1)
    scores = content @ key.transpose(2, 3) + by_distance.gather(3, columns.expand(rows, heads, -1, -1))
    expected = ((scores if bias is None else scores + bias.double()).softmax(-1) * factors) @ value
    attended.backward(grad)
    expected.backward(grad.double())
    assert_equal([(attended, expected), *((o.grad, e.grad) for o, e in zip(ours, exact, strict=True))], dtype)


@DTYPES
def test_tensors_may_be_anywhere_in_memory(dtype: torch.dtype) -> None:
    """Time before heads, heads before time, in pieces, or channels apart."""
    torch.manual_seed(1)
    shapes = [(2, 3, length, 5) for length in (9, 9, 14, 14)]
    drawn, table = [torch.randn(shape).to(dtype) for shape in shapes], torch.randn(3, 14, 5).to(dtype)
    grad = torch.randn(2, 3, 9, 5).to(dtype)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
        lambda x: torch.cat([x, x], dim=-2)[..., : x.size(-2), :],
    ]
    results = []
    for move in layouts:
        content, distance, key, value = ours = [move(x).detach().requires_grad_() for x in drawn]
        vectors = table.mT.contiguous().mT if move is layouts[2] else table.clone()
        first = attend(content, [key[:, :, :5], key[:, :, 5:]], [value[:, :, :5], value[:, :, 5:]])
        second = attend_relative(content, distance, [key], [value], vectors.requires_grad_())
        for attended in (first, second):
            gradients = torch.autograd.grad(attended, [*ours, vectors], move(grad), allow_unused=True)
            results.append([attended, *(x for x in gradients if x is not None)])
    exact = not no_kernels()
    for number, result in enumerate(results):
        for one, other in zip(results[number % 2], result, strict=True):
            tolerance = 0.0 if exact else 2 * TYPES[dtype]
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_rows_of_a_batch_may_share_their_keys() -> None:
    query, key = torch.randn(4, 2, 9, 8, requires_grad=True), torch.randn(1, 2, 9, 8, requires_grad=True)
    results = []
    for shared in (True, False):
        keys = key.expand(4, -1, -1, -1) if shared else torch.cat([key] * 4)
        attended = attend(query, [keys], [keys])
        results.append([attended, *torch.autograd.grad(attended.square().sum(), (query, key))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@dataclass(frozen=True)
class FirstHidden(Causal):
    """A plug-in's: no query but the first reads the first key."""

    def bias(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        bias = super().bias(queries, keys, device, dtype)
        assert bias is not None
        bias = bias.clone()
        bias[1:, 0] = -math.inf
        return bias


@pytest.mark.parametrize("p", [1e-9, 0.3])
def test_a_subclass_hides_keys_of_its_own(p: float) -> None:
    query, key, value = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 9, 9))
    torch.manual_seed(7)
    attended = attend(query, [key], [value], FirstHidden(), p)
    for read in torch.autograd.grad(attended[:, :, 1:].sum(), (key, value)):
        assert not read[:, :, 0].any() and read[:, :, 1].any()


def test_without_dropout_a_kernel_hides_the_keys_of_a_subclass() -> None:
    """Where there is none, torch's reads the mask."""
    query, key, value = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 9, 9))
    attended = attend(query, [key], [value], FirstHidden())
    (read,) = torch.autograd.grad(attended[:, :, 1:].sum(), key)
    assert bool(read[:, :, 0].any()) == (no_kernels())


def test_a_subclass_hides_keys_of_relative_attention() -> None:
    attention = RelativeAttention(16, 2, 0.0, head_dim=8)
    x, table = torch.randn(3, 5, 16), torch.randn(5, 16)
    for visible in (CAUSAL, FirstHidden()):
        values = x.clone().requires_grad_()
        attended = attention(values, positions=RelativePositions(table), visible=visible)
        (gradient,) = torch.autograd.grad(attended[:, 1:].sum(), values)
        assert bool(gradient[:, 0].any()) == (visible == CAUSAL)


@DTYPES
@pytest.mark.parametrize("queries", [3, 8, 40])
@pytest.mark.parametrize("relative", [False, True])
def test_keys_ahead_change_nothing_and_get_a_gradient_of_zero(relative: bool, queries: int, dtype: torch.dtype) -> None:
    keys, seen = queries + 30, 31 + queries // 2
    query, key, value = leaves(dtype, *((2, 3, length, 9) for length in (queries, keys, keys)))[0]
    table = torch.randn(3, keys, 9).to(dtype)

    def attended(key: Tensor, value: Tensor) -> Tensor:
        """Of the queries up to the last key that is read."""
        if relative:
            return attend_relative(query, query, [key], [value], table)[:, :, : seen - 30]
        return attend(query, [key], [value], CAUSAL, 1e-9)[:, :, : seen - 30]

    result = attended(key, value)
    for read in torch.autograd.grad(result.square().sum(), (key, value)):
        assert not read[:, :, seen:].any() and bool(read[:, :, :seen].any(-1).all())
    changed = [torch.cat([x[:, :, :seen], 3 - 2 * x[:, :, seen:]], dim=2) for x in (key, value)]
    if not no_kernels():
        assert torch.equal(attended(*changed), result)
    torch.testing.assert_close(attended(*changed), result, rtol=2 * TYPES[dtype], atol=2 * TYPES[dtype])


def test_hidden_scores_have_no_probability() -> None:
    """Of queries and keys whose scores are far apart; the values give the probabilities."""

    @dataclass(frozen=True, eq=False)
    class Three(Bidirectional):
        def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
            return (torch.arange(keys) < 3).expand(queries, keys)

    scores = torch.tensor([1.0, 90.0, -90.0, *[5.0] * 37])
    key = torch.zeros(40, 40)
    key[:, 0] = scores * math.sqrt(40)
    query, value = torch.eye(40)[:1].expand(2, 40), torch.eye(40)
    attended = attend(query[None, None], [key[None, None]], [value[None, None]], Three(), 1e-9)[0, 0]
    expected = torch.where(torch.arange(40) < 3, scores, -torch.inf).softmax(-1)
    torch.testing.assert_close(attended, expected.expand(2, 40))
    assert not attended[:, 3:].any()


def test_attention_is_dropped_as_a_whole_at_probability_one() -> None:
    x, table = torch.randn(2, 3, 9, 8, requires_grad=True), torch.randn(9, 16)
    assert not attend(x, [x], [x], CAUSAL, 1.0).any()
    attention = RelativeAttention(16, 2, 1.0, head_dim=8)
    assert not attention(torch.randn(3, 9, 16), positions=RelativePositions(table)).any()


@pytest.mark.parametrize("p", [0.0, 1e-9])
def test_queries_before_all_keys_attend_to_nothing(p: float) -> None:
    """The kernel would write before the rows of such queries."""
    query, key = torch.randn(2, 3, 60, 8, requires_grad=True), torch.randn(2, 3, 5, 8)
    assert not kernel.computes(query, [key], [key], p)
    attended = attend(query, [key], [key], CAUSAL, p)
    nothing = (attended.isnan() | (attended == 0)).all(-1)
    assert nothing[:, :, :55].all() and not nothing[:, :, 55:].any()
    if p:
        assert attended[:, :, :55].isnan().all()


@pytest.mark.parametrize(("keys", "distances"), [(5, 5), (60, 59), (60, 70)])
def test_relative_attention_has_a_distance_for_each_key_and_a_key_for_each_query(keys: int, distances: int) -> None:
    content, key, table = torch.randn(2, 3, 60, 8), torch.randn(2, 3, keys, 8), torch.randn(3, distances, 8)
    for parts in ([key], [key[:, :, :3], key[:, :, 3:]]):
        assert not kernel.computes(content, parts, parts, 0.0, content, table)


@pytest.mark.parametrize("attends", ["attention", "pieces", "by distance"])
def test_a_second_derivative_is_an_error_and_not_zero(attends: str) -> None:
    x = torch.randn(3, 2, 6, 8, dtype=torch.float32, requires_grad=True)
    if no_kernels():
        pytest.skip("torch's operators have one")
    parts = [x[:, :, :2], x[:, :, 2:]]
    attended = {
        "attention": lambda: attend(x, [x], [x], CAUSAL, 0.1),
        "pieces": lambda: attend(x, parts, parts),
        "by distance": lambda: attend_relative(x, x, [x], [x], x[0]),
    }[attends]()
    (first,) = torch.autograd.grad(attended.square().sum(), x, create_graph=True)
    assert first.any()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("hides", [False, True])
def test_the_move_by_distances_has_two_derivatives(hides: bool) -> None:
    raw = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    bias = CAUSAL.bias(4, 6, raw.device, torch.float64) if hides else None

    def weights(raw: Tensor) -> Tensor:
        # Scores of keys after the query need a gradient of zero.
        scores = shift(raw, bias)
        return scores.softmax(-1) if hides else scores.tril(2)

    assert torch.autograd.gradgradcheck(weights, raw) and torch.autograd.gradcheck(weights, raw)


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of threads is as before, after all."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@DTYPES
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.usefixtures("threads")
def test_threads_change_no_number_but_of_the_sum_over_rows(p: float, dtype: torch.dtype) -> None:
    """Each computes heads of its own; vectors of distances alone have a gradient of all rows."""
    content, distance, key, value = leaves(dtype, *((4, 3, length, 7) for length in (20, 20, 37, 37)))[0]
    if no_kernels():
        pytest.skip("torch's matrix products have other sums")
    table, results = torch.randn(3, 37, 7).to(dtype).requires_grad_(), []
    for count in (1, 2, 3, 5, 12, 64):
        torch.set_num_threads(count)
        torch.manual_seed(1)
        plain = attend(content, [key], [value], CAUSAL, p)
        relative = kernel.relative_attention(content, distance, [key], [value], table, None, p)
        inputs = (content, distance, key, value)
        gradients = torch.autograd.grad(relative.square().sum() + plain.square().sum(), (*inputs, table))
        results.append([plain, relative, *gradients])
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0][:-1], other[:-1], strict=True))
        torch.testing.assert_close(results[0][-1], other[-1], rtol=TYPES[dtype], atol=10 * TYPES[dtype])


@pytest.mark.usefixtures("threads")
def test_the_sum_over_rows_is_equal_in_two_runs() -> None:
    torch.set_num_threads(5)
    x, table = torch.randn(4, 3, 20, 8), torch.randn(3, 20, 8, requires_grad=True)
    sums = [torch.autograd.grad(attend_relative(x, x, [x], [x], table).square().sum(), table)[0] for _ in range(2)]
    assert torch.equal(*sums)


def saved_by(attends: Callable[[], Tensor]) -> list[int]:
    """Sizes of the tensors that are saved for the backward pass."""
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        attends()
    return saved


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_attention_keeps_no_scores_but_its_probabilities(p: float) -> None:
    query, key, value = (torch.randn(1, 8, length, 4, requires_grad=True) for length in (64, 128, 128))
    saved = saved_by(lambda: attend(query, [key], [value], CAUSAL, p))
    assert no_kernels() or [size for size in saved if size > 8 * 64 * 128 / 7] == [8 * 64 * 128]


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_relative_attention_keeps_no_scores_but_its_probabilities(p: float) -> None:
    content, distance, key, value = (torch.randn(2, 4, n, 4, requires_grad=True) for n in (64, 64, 128, 128))
    saved = saved_by(lambda: attend_relative(content, distance, [key], [value], torch.randn(4, 128, 4), None, p))
    assert no_kernels() or [size for size in saved if size > 8 * 64 * 128 / 7] == [8 * 64 * 128]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("queries", [3, 8, 40])
def test_without_gradients_attention_has_the_same_numbers_and_masks(queries: int, p: float) -> None:
    """Of a few queries torch's operators compute it then."""
    query, key = torch.randn(2, 3, queries, 8, requires_grad=True), torch.randn(2, 3, 40, 8)
    results = []
    for gradient in (True, False):
        torch.manual_seed(1)
        with torch.set_grad_enabled(gradient):
            plain = attend(query, [key], [key], CAUSAL, p)
            results.append(torch.stack([plain, attend_relative(query, query, [key], [key], key[0], None, p)]))
    by_kernel = not no_kernels() and queries >= 8
    torch.testing.assert_close(*results, rtol=0 if by_kernel else 1e-5, atol=0 if by_kernel else 1e-6)


@dataclass(frozen=True)
class Unread(AttentionMask):
    """The third query reads no key."""

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        return (torch.arange(queries, device=device) != 2)[:, None].expand(queries, keys)


@DTYPES
def test_a_query_that_reads_no_key_is_zero_as_torch_has_it(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 3, 10, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    attended = attend(query, [key], [value], Unread())
    assert not attended[:, :, 2].any() and attended[:, :, 3].all()
    attended.sum().backward()
    for x in (query, key, value):
        assert x.grad is not None and x.grad.isfinite().all()
    assert query.grad is not None and not query.grad[:, :, 2].any()


def test_long_attention_without_dropout_saves_no_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_MOST_SAVED", 2 * 3 * 64 * 64 - 1)
    query = torch.randn(2, 3, 64, 8, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        attend(query, [query], [query])
    assert max(saved) < 2 * 3 * 64 * 64
