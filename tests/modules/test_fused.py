"""Kernels of training compute what torch's operators do, on whatever the compiler and the processor offer."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.modules import fused, native, noise
from fairseq.modules.attention import CAUSAL, Bidirectional, Causal, Visibility
from fairseq.modules.attention import _attend_unfused as attend_unfused
from fairseq.modules.dropout import add_dropout, dropout, relu_dropout, softmax_dropout
from fairseq.modules.output_layer import linear_cross_entropy
from fairseq.modules.relative_attention import RelativeAttention, RelativePositions, shift

SOURCE = Path(fused.__file__).with_name("fused.c")
COMPILED = native.library("training", SOURCE) is not None
TYPES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=["compiled", "compiled without AVX-512", "no compiler"], autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What this machine is taken for."""
    if request.param == "no compiler":
        monkeypatch.setenv("CC", "false")
    elif not COMPILED:
        pytest.skip("no C compiler")
    elif "without" in request.param:
        monkeypatch.setenv("CFLAGS", "-mno-avx512f")  # nothing of AVX-512, bfloat16 included
    native.library.cache_clear()
    yield request.param
    assert (native.library("training", SOURCE) is None) == (request.param == "no compiler")
    native.library.cache_clear()


def splitmix64(seed: int, count: int) -> np.ndarray:
    """Words of the generator as its authors write it, a state that grows and is hashed: uint64."""
    words, whole = [], (1 << 64) - 1
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & whole
        z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & whole
        z = (z ^ z >> 27) * 0x94D049BB133111EB & whole
        words.append(z ^ z >> 31)
    return np.array(words, dtype=np.uint64)


def mask_of(p: float, shape: tuple[int, ...]) -> Tensor:
    """The factors of the next dropout, in float64: sixteen bits of noise from a seed that torch draws."""
    seed, count = int(torch.randint(1 << 62, ())), math.prod(shape) // 4 + 1
    words = splitmix64(seed, count) if noise.generator() == "splitmix64" else np.random.SFC64(seed).random_raw(count)
    bits = words.view(np.int16)
    dropped = round(p * 65536)
    kept = torch.from_numpy(bits[: math.prod(shape)].astype(int) >= dropped - 32768).view(shape)
    return kept.double() * 65536 / (65536 - dropped)


@pytest.fixture(params=noise.GENERATORS)
def generator(request: pytest.FixtureRequest) -> Iterator[str]:
    """What masks are drawn by."""
    noise.use_generator(request.param)
    yield request.param
    noise.use_generator(noise.GENERATORS[0])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (31,), (3, 32), (2, 5, 77), (9, 1000), (15, 9001)], ids=str)
def test_dropouts_and_their_gradients_are_those_of_torch_in_float64(
    shape: tuple[int, ...], dtype: torch.dtype, generator: str
) -> None:
    torch.manual_seed(7)
    factors = mask_of(0.3, shape)
    x, residual, grad = (torch.randn(shape).to(dtype) for _ in range(3))
    cases: list[tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = [
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


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("seen", [CAUSAL, Causal(window=3), Bidirectional(torch.arange(9) > torch.tensor([[7], [8]]))])
def test_attention_in_groups_of_heads_is_that_of_torch_in_float64(
    seen: Visibility, p: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of 2 · 6 heads of 5 · 9 scores, of which a group's begins with a byte from the eighth head on only."""
    monkeypatch.setattr(fused, "_CACHED_SCORES", 1)
    inputs = [torch.randn(2, length, 6, 16).transpose(1, 2).to(dtype) for length in (5, 9, 9)]
    grad = torch.randn(2, 6, 5, 16).to(dtype)
    torch.manual_seed(7)
    factors = mask_of(p, (2, 6, 5, 9)) if p else torch.ones(())
    ours, exact = ([x.clone().to(kind).requires_grad_() for x in inputs] for kind in (dtype, torch.double))
    torch.manual_seed(7)
    attended = attend_unfused(*ours, seen, p)
    scores = exact[0] @ exact[1].transpose(2, 3) / 4 + seen.bias(5, 9, grad.device).double()  # type: ignore[union-attr]
    expected = (scores.softmax(-1) * factors) @ exact[2]
    attended.backward(grad)
    expected.backward(grad.double())
    for a, b in [(attended, expected), *((o.grad, e.grad) for o, e in zip(ours, exact, strict=True))]:
        assert a is not None and b is not None
        torch.testing.assert_close(a.double(), b, rtol=2 * TYPES[dtype], atol=2 * TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [(5, 9), (1, 40), (21, 21), (7, 70)])
def test_relative_attention_in_groups_of_heads_is_that_of_torch_in_float64(
    lengths: tuple[int, int], window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score of key j for query i is the content's plus the distance's, column T − 1 − i + j of the products."""
    monkeypatch.setattr(fused, "_CACHED_SCORES", 1)
    queries, keys = lengths
    inputs = [torch.randn(3, 2, length, 16) / 2 for length in (queries, queries, keys, keys)]
    inputs.append(torch.randn(3, keys, 16))
    grad = torch.randn(3, 2, queries, 16).to(dtype)
    bias = Causal(window).bias(queries, keys, grad.device)
    ours, exact = ([x.to(dtype).to(kind, copy=True).requires_grad_() for x in inputs] for kind in (dtype, torch.double))
    attended = fused.relative_attention(*ours, None if window is None or bias is None else bias.to(dtype))
    if attended is None:
        assert fused.kernels(grad) is None
        return
    content, distance, key, value, table = exact
    by_distance = distance @ table.transpose(1, 2)[:, None]
    columns = (torch.arange(keys) + queries - 1 - torch.arange(queries)[:, None]).clamp(max=keys - 1)
    scores = content @ key.transpose(2, 3) + by_distance.gather(3, columns.expand_as(by_distance))
    expected = (scores if bias is None else scores + bias.double()).softmax(-1) @ value
    attended.backward(grad)
    expected.backward(grad.double())
    for a, b in [(attended, expected), *((o.grad, e.grad) for o, e in zip(ours, exact, strict=True))]:
        assert a is not None and b is not None
        torch.testing.assert_close(a.double(), b, rtol=2 * TYPES[dtype], atol=2 * TYPES[dtype])


@dataclass(frozen=True)
class FirstHidden(Causal):
    """A plug-in's: no query but the first reads the first key."""

    def bias(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        bias = super().bias(queries, keys, device, dtype)
        assert bias is not None
        bias = bias.clone()
        bias[1:, 0] = -math.inf
        return bias


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_subclass_hides_keys_of_its_own(p: float) -> None:
    query, key, value = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 9, 9))
    torch.manual_seed(7)
    attended = attend_unfused(query, key, value, FirstHidden(), p)
    (gradient,) = torch.autograd.grad(attended[:, :, 1:].sum(), key)
    assert not gradient[:, :, 0].any() and gradient[:, :, 1].any()


def test_a_subclass_hides_keys_of_relative_attention() -> None:
    attention = RelativeAttention(16, 2, 0.0, head_dim=8)
    x, table = torch.randn(3, 5, 16), torch.randn(5, 16)
    for visible in (CAUSAL, FirstHidden()):
        values = x.clone().requires_grad_()
        attended = attention(values, positions=RelativePositions(table), visible=visible)
        (gradient,) = torch.autograd.grad(attended[:, 1:].sum(), values)
        assert bool(gradient[:, 0].any()) == (visible == CAUSAL)


@pytest.mark.parametrize("p", [0.0, 1e-9])
def test_queries_before_all_keys_attend_to_nothing(p: float) -> None:
    """The kernel would write before the rows of such queries."""
    query, key = torch.randn(2, 3, 60, 8, requires_grad=True), torch.randn(2, 3, 5, 8)
    nothing = attend_unfused(query, key, key, CAUSAL, p).isnan().all(-1)
    assert nothing[:, :, :55].all() and not nothing[:, :, 55:].any()


@pytest.mark.parametrize(("keys", "distances"), [(5, 5), (60, 59), (60, 70)])
def test_relative_attention_has_a_distance_for_each_key_and_a_key_for_each_query(keys: int, distances: int) -> None:
    content, key, table = torch.randn(2, 3, 60, 8), torch.randn(2, 3, keys, 8), torch.randn(2, distances, 8)
    assert fused.relative_attention(content, content, key, key, table, None) is None


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("attends", ["softmax", "attention", "by distance"])
def test_a_second_derivative_is_an_error_and_not_zero(attends: str, power: int) -> None:
    """Also in a sum with others, and where the first derivative is that of a sum."""
    x = torch.randn(3, 2, 6, 8, dtype=torch.float32, requires_grad=True)
    if fused.kernels(x) is None:
        pytest.skip("torch's operators have one")
    attended = {
        "softmax": lambda: softmax_dropout(x, 0.1),
        "attention": lambda: attend_unfused(x, x, x, CAUSAL, 0.1),
        "by distance": lambda: fused.relative_attention(x, x, x, x, x[:, 0], None),
    }[attends]()
    (first,) = torch.autograd.grad(attended.pow(power).sum(), x, create_graph=True)
    assert first.any()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.square().sum() + x.square().sum(), x)


@pytest.mark.parametrize("hides", [False, True])
def test_the_move_by_distances_has_two_derivatives(hides: bool) -> None:
    raw = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    bias = CAUSAL.bias(4, 6, raw.device, torch.float64) if hides else None

    def weights(raw: Tensor) -> Tensor:
        # Scores of keys after the query need a gradient of zero.
        scores = shift(raw, bias)
        return scores.softmax(-1) if hides else scores.tril(2)

    assert torch.autograd.gradgradcheck(weights, raw) and torch.autograd.gradcheck(weights, raw)


class Wrapped(Tensor):
    """A tensor whose elements may be elsewhere, as those of distributed tensors."""


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("change", [lambda x: x.as_subclass(Wrapped), Tensor.double, lambda x: x.to("meta")])
def test_attention_of_any_tensor_without_a_kernel_is_left_to_torch(
    number: int, change: Callable[[Tensor], Tensor]
) -> None:
    tensors = [torch.randn(2, 3, 6, 8) for _ in range(4)] + [torch.randn(2, 6, 8)]
    tensors[number] = change(tensors[number])
    assert fused.relative_attention(*tensors, None) is None
    tensors = [torch.randn(6, 5, 8) for _ in range(3)]
    tensors[number % 3] = change(tensors[number % 3])
    assert fused.attention(*tensors, None, 0.1) is None


@pytest.mark.parametrize("rows", [1, 33])
def test_masks_do_not_depend_on_the_number_of_threads(rows: int, generator: str) -> None:
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


def test_attention_keeps_no_scores_but_its_probabilities() -> None:
    query, key, value = (torch.randn(1, 8, length, 4, requires_grad=True) for length in (64, 128, 128))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attend_unfused(query, key, value, CAUSAL, 0.1)
    large = [t for t in saved if t.numel() >= 8 * 64 * 128]
    assert len(large) == 1 or fused.kernels(query) is None


def test_relative_attention_keeps_no_scores_but_its_probabilities() -> None:
    inputs = [torch.randn(4, 2, length, 4, requires_grad=True) for length in (64, 64, 128, 128)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attended = fused.relative_attention(*inputs, torch.randn(4, 128, 4), None)
    assert [t.numel() for t in saved if t.numel() >= 8 * 64 * 128] == ([] if attended is None else [8 * 64 * 128])


def test_a_mask_takes_a_bit_an_element() -> None:
    x = torch.randn(4096, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(x, 0.1)
    assert fused.kernels(x) is None or sum(t.nbytes for t in saved) == 4096 // 8 + 8


def test_hidden_scores_have_no_probability() -> None:
    scores = torch.full((2, 40), float("-inf"))
    scores[:, :3] = torch.tensor([1.0, 90.0, -90.0])
    torch.testing.assert_close(softmax_dropout(scores, 1e-9), scores.softmax(-1))


def test_threads_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_LEAST_WORK", 1)
    x, threads = torch.randn(64, 1000), torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        torch.manual_seed(1)
        results.append(torch.stack([dropout(x, 0.2), softmax_dropout(x, 0.2)]))
    torch.set_num_threads(threads)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_threads_change_no_probability_of_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's matrix products, whose sums threads may reorder."""
    monkeypatch.setattr(fused, "_LEAST_WORK", 1)
    scores, by_distance, grad = (torch.randn(12 * 40, 70).to(dtype) for _ in range(3))
    if fused.kernels(scores) is None:
        pytest.skip("no kernels")
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            probabilities, of_scores, of_distances = (torch.full_like(scores, torch.nan) for _ in range(3))
            fused._soften(scores, by_distance, probabilities, None, None, 0.0, 40)
            fused._soften_gradient(probabilities, grad, of_scores, of_distances, None, 0.0, 40)
            results.append(torch.stack([probabilities, of_scores, of_distances]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_a_run_without_kernels_is_the_same_run(tmp_path: Path, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine == "no compiler":
        pytest.skip("compared with the others")
    flags = [runs.SHORTFORMER, runs.DROPOUT, "--max-update 6 --disable-validation"]
    logs = [runs.updates(runs.train(tmp_path / "with", *flags))]
    with monkeypatch.context() as patch:
        patch.setattr(fused, "library", lambda *arguments: None)
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
    """Logits in float32 would be mapped from the system, and their pages cleared, anew in every chunk."""
    hidden, weight = torch.randn(64, 8).bfloat16(), torch.randn(500, 8).bfloat16().requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(hidden, weight, torch.randint(500, (64,)))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < 64 * 500 * 4 or fused.kernels(weight) is None


def test_the_address_sanitizer_finds_nothing(tmp_path: Path, machine: str) -> None:
    if machine == "no compiler":
        pytest.skip("nothing is compiled")
    main = tmp_path / "main.c"
    flags = ["-O1", "-march=native", *os.environ.get("CFLAGS", "").split(), "-fsanitize=address,undefined", "-w"]
    command = [*os.environ.get("CC", "cc").split(), *flags, main, "-o", tmp_path / "main", "-lm"]
    # Calls of kernels that do not compile must fail: they are no reason to skip.
    main.write_text("int main(void) { return 0; }")
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("the compiler has no address sanitizer")
    main.write_text(Path(__file__).with_name("addresses.c").read_text().replace('"FUSED"', f'"{SOURCE}"'))
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


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
    assert not softmax_dropout(x, 1.0).any() and not relu_dropout(x, 1.0).any()


def test_another_default_device_does_not_hold_masks() -> None:
    x = torch.ones(1000)
    with torch.device("meta"):
        assert dropout(x, 0.5).device.type == "cpu"
