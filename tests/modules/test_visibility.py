"""Attention over the keys that are visible, in every way that it is computed, against a softmax one
query at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from fairseq.models.transformer_xl import TransformerXLDecoder
from fairseq.models.transformer_xl_settings import TransformerXLConfig
from fairseq.modules import attention as attention_module
from fairseq.modules import dispatch
from fairseq.modules.attention import (
    CAUSAL,
    AttentionMask,
    Bidirectional,
    Causal,
    CausalInDocuments,
    PositionInfusedAttention,
    SelfAttention,
    attend,
)
from fairseq.modules.relative_attention import RelativeAttention, RelativePositions
from fairseq.modules.transformer_layer import TransformerLayer

PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3, [True] * 7])  # the last row is padding only
DOCUMENTS = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 0, 1]])
VISIBLE = {
    "causal": CAUSAL,
    "window": Causal(3),
    "bidirectional": Bidirectional(),
    "padded": Bidirectional(PADDING),
}
FLEXIBLE = [Causal(3), Bidirectional(PADDING), CausalInDocuments(3, positions=DOCUMENTS)]
KINDS = pytest.mark.parametrize("visible", VISIBLE.values(), ids=VISIBLE)
PATHS = {
    "float32": (torch.float32, 0.0, 1e-6),
    "bfloat16": (torch.bfloat16, 0.0, 3e-2),
    "float16": (torch.float16, 0.0, 4e-3),
    "dropout": (torch.float32, 1e-9, 1e-4),  # written out, and drops next to nothing
    "dropout in bfloat16": (torch.bfloat16, 1e-9, 3e-2),
}


def sees(visible: AttentionMask, row: int, query: int, key: int, ahead: int) -> bool:
    """Whether *query* reads *key*; *ahead* keys stand before the first query."""
    if isinstance(visible, Causal):
        distance = ahead + query - key
        inside = not isinstance(visible, CausalInDocuments) or distance <= int(visible.positions[row, query])
        return inside and distance >= 0 and (visible.window is None or distance < visible.window)
    assert isinstance(visible, Bidirectional)
    return visible.padding is None or bool(visible.padding[row].all()) or not bool(visible.padding[row, key])


def naive(query: Tensor, key: Tensor, value: Tensor, visible: AttentionMask) -> Tensor:
    """The attention of each query by itself, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    result, ahead = torch.zeros_like(query), key.size(2) - query.size(2)
    for b in range(query.size(0)):
        for h in range(query.size(1)):
            for t in range(query.size(2)):
                seen = [s for s in range(key.size(2)) if sees(visible, b, t, s, ahead)]
                weights = (key[b, h, seen] @ query[b, h, t] / math.sqrt(query.size(3))).softmax(0)
                result[b, h, t] = weights @ value[b, h, seen]
    return result


def inputs(queries: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values of 3 rows, 2 heads of 4 channels, 7 keys."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(3, 2, count, 4, generator=generator).to(dtype) for count in (queries, 7, 7)]
    return [x.requires_grad_() for x in made]


@KINDS
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("queries", [1, 4, 7])
@pytest.mark.parametrize("path", PATHS)
def test_attention_reads_the_visible_keys_in_every_path(
    path: str, queries: int, gradient: bool, visible: AttentionMask
) -> None:
    dtype, dropout_p, tolerance = PATHS[path]
    query, key, value = inputs(queries, dtype)
    with torch.set_grad_enabled(gradient):
        found = attend(query, [key], [value], visible, dropout_p)
    wanted = naive(query, key, value, visible)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
    if gradient:
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        ours = torch.autograd.grad((found * weights).sum(), (query, key, value))
        theirs = torch.autograd.grad((wanted * weights).sum(), (query, key, value))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=3 * tolerance, rtol=3 * tolerance)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("path", PATHS)
def test_documents_of_a_row_are_apart_in_every_path(path: str, window: int | None) -> None:
    dtype, dropout_p, tolerance = PATHS[path]
    tensors = inputs(7, dtype)
    visible = CausalInDocuments(window, {}, positions=DOCUMENTS)
    results = []
    for found in (attend(tensors[0], [tensors[1]], [tensors[2]], visible, dropout_p), naive(*tensors, visible)):
        results.append([found, *torch.autograd.grad(found.double().square().sum(), tensors)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=5 * tolerance, rtol=5 * tolerance)


@KINDS
@pytest.mark.parametrize("gradient", [True, False])
def test_a_few_heads_at_a_time_are_all_of_them(gradient: bool, visible: AttentionMask) -> None:
    query, key, value = inputs(4, torch.bfloat16)
    with torch.set_grad_enabled(gradient):
        together = attend(query, [key], [value], visible)
        apart = [attend(query[:, h : h + 1], [key[:, h : h + 1]], [value[:, h : h + 1]], visible) for h in range(2)]
    assert torch.equal(torch.cat(apart, dim=1), together)


@KINDS
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_keys_of_memory_and_segment_are_those_of_one_tensor(path: str, gradient: bool, visible: AttentionMask) -> None:
    dtype, dropout_p, _ = PATHS[path]
    query, key, value = inputs(4, dtype)
    pieces = [[x[:, :, :3], x[:, :, 3:]] for x in (key, value)]
    with torch.set_grad_enabled(gradient):
        assert torch.equal(
            attend(query, *pieces, visible, dropout_p), attend(query, [key], [value], visible, dropout_p)
        )


@pytest.mark.parametrize("kind", [SelfAttention, PositionInfusedAttention])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_rows_of_padding_only_give_no_nan(kind: type[SelfAttention], dropout: float) -> None:
    layer = TransformerLayer(kind(8, 2, dropout), 8, 16)
    positions = torch.randn(7, 8)
    x = torch.randn(3, 7, 8, requires_grad=True)
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            out, _ = layer(x, positions=positions, visible=Bidirectional(PADDING))
        (gradient,) = torch.autograd.grad(out.float().square().sum(), x)
        assert out.isfinite().all() and gradient.isfinite().all()


def test_padding_changes_nothing_for_the_tokens_beside_it() -> None:
    layer = TransformerLayer(SelfAttention(8, 2), 8, 16).double()
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    changed = torch.where(PADDING[:, :, None], 9.0, x)
    visible = Bidirectional(PADDING)
    (one, _), (other, _) = layer(x, visible=visible), layer(changed, visible=visible)
    torch.testing.assert_close(one[:2][~PADDING[:2]], other[:2][~PADDING[:2]])
    alone, _ = layer(x[1:2, :4], visible=Bidirectional())
    torch.testing.assert_close(one[1:2, :4], alone)


@KINDS
def test_weights_for_analysis_are_those_that_attention_uses(visible: AttentionMask) -> None:
    module = SelfAttention(8, 2).double()
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    weights = module.weights(x, visible=visible)
    wanted = module.out_proj((weights @ module._heads(module.v_proj(x))).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, visible=visible), wanted)


def test_attention_is_causal_unless_told_otherwise() -> None:
    module, x = SelfAttention(8, 2), torch.randn(2, 5, 8)
    assert torch.equal(module(x), module(x, visible=CAUSAL))
    assert not torch.allclose(module(x), module(x, visible=Bidirectional()))


def test_attention_that_cannot_look_ahead_says_so() -> None:
    relative = RelativeAttention(8, 2, 0.0, head_dim=4)
    with pytest.raises(ValueError, match="causal only"):
        relative(torch.zeros(1, 3, 8), positions=RelativePositions(torch.zeros(3, 8)), visible=Bidirectional())
    module = SelfAttention(8, 2)
    with pytest.raises(ValueError, match="causal"):
        module(torch.zeros(1, 3, 8), visible=Bidirectional(), cache=module.new_cache(1, 4))


# The kernels of GPUs


class Calls(TorchFunctionMode):
    """What is handed to torch's fused attention, which is called all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[dict[str, Any]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            self.made.append({"dim": args[0].size(-1), **kwargs})
        return function(*args, **(kwargs or {}))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The calls of torch's fused attention in a test whose CPU stands for a GPU."""
    monkeypatch.setattr(dispatch, "is_cpu", lambda x: False)
    with Calls() as mode:
        yield mode.made


@pytest.mark.parametrize("dropout_p", [0.0, 1e-9])
@pytest.mark.parametrize("precise", [True, False])
def test_on_gpus_a_segment_after_memory_is_causal_by_torch_s_own_bias(
    calls: list[dict[str, Any]], precise: bool, dropout_p: float
) -> None:
    query, key, value = inputs(4, torch.float32 if precise else torch.bfloat16)
    visible = CAUSAL.prepare(4, 7, query.device, blocks=False)
    found = attend(query, [key[:, :, :3], key[:, :, 3:]], [value[:, :, :3], value[:, :, 3:]], visible, dropout_p)
    tolerance = 1e-6 if precise else 3e-2
    torch.testing.assert_close(found.double(), naive(query, key, value, CAUSAL), atol=tolerance, rtol=tolerance)
    assert isinstance(calls[0]["attn_mask"], CausalBias) and calls[0]["dropout_p"] == dropout_p


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("visible", FLEXIBLE, ids=["window", "padded", "documents"])
def test_on_gpus_flex_attention_reads_the_visible_keys(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], visible: AttentionMask, groups: int
) -> None:
    """Computed on the CPU, where torch refuses to compute its gradient."""
    monkeypatch.setattr(attention_module, "_compiled_flex_attention", lambda: flex.flex_attention)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    queries = 7 if isinstance(visible, CausalInDocuments) else 4
    query, key, value = inputs(queries)
    shared = [x[:, :groups].detach().requires_grad_() for x in (key, value)]
    prepared = visible.prepare(queries, 7, query.device, blocks=True)
    results = []
    for found in (
        attend(query, [shared[0]], [shared[1]], prepared),
        naive(query, *(x.repeat_interleave(2 // groups, dim=1) for x in shared), visible),
    ):
        results.append([found, *torch.autograd.grad(found.square().sum(), [query, *shared])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), atol=1e-5, rtol=1e-5)
    assert not calls


def test_flex_attention_is_for_cuda_where_it_computes_what_attention_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Asked(Causal):
        def prepare(self, queries: int, keys: int, device: torch.device, blocks: bool) -> AttentionMask:
            asked.append(blocks)
            return self

    monkeypatch.setattr(attention_module, "_has_compiler", lambda: True)
    kinds = [(128, 0.1, "cuda", 128), (64, 0.0, "cuda", 128), (128, 0.0, "cuda", 127), (128, 0.0, "xpu", 128)]
    for width, dropout, device, queries in [(128, 0.0, "cuda", 128), *kinds]:
        SelfAttention(width, 8, dropout).prepare(Asked(), queries, 500, torch.device(device))
    assert asked == [True, False, False, False]
    SelfAttention(128, 8, 0.1).eval().prepare(Asked(), 128, 500, torch.device("cuda"))
    assert asked.pop()
    monkeypatch.setattr(attention_module, "_has_compiler", lambda: False)
    SelfAttention(128, 8).prepare(Asked(), 128, 500, torch.device("cuda"))
    assert not asked.pop() and Causal(3).prepare(128, 500, torch.device("cpu"), False).fused is None
    for device in ("cpu", "meta", "mps"):
        assert SelfAttention(128, 8).prepare(CAUSAL, 128, 500, torch.device(device)) is CAUSAL


@pytest.mark.parametrize("is_flash", [True, False])
def test_on_gpus_heads_share_keys_where_a_kernel_takes_that(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]], is_flash: bool
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: is_flash)
    for queries, visible, is_shared in [(7, CAUSAL, True), (4, CAUSAL, True), (7, Causal(3), False)]:
        query, key, value = inputs(queries)
        key, value = key[:, :1], value[:, :1]
        found = attend(query, [key], [value], visible.prepare(queries, 7, query.device, blocks=False))
        wanted = naive(query, key.expand(-1, 2, -1, -1), value.expand(-1, 2, -1, -1), visible)
        torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-6)
        assert calls[0]["enable_gqa"] is (is_flash and is_shared)
        calls.clear()


def test_on_gpus_a_segment_alone_is_causal_by_flag_and_padding_is_the_only_mask(calls: list[dict[str, Any]]) -> None:
    for queries, visible, dropout_p in [
        (7, CAUSAL, 0.1),
        (1, CAUSAL, 0.0),
        (7, Bidirectional(), 0.0),
        (7, Bidirectional(PADDING), 0.0),
    ]:
        query, key, value = inputs(queries)
        attend(query, [key], [value], visible, dropout_p)
    assert calls[0]["is_causal"] is True and calls[0]["dropout_p"] == 0.1 and calls[0]["attn_mask"] is None
    assert calls[1]["attn_mask"] is None and calls[2]["attn_mask"] is None
    mask = calls[3]["attn_mask"]
    assert isinstance(mask, Tensor) and mask.shape == (3, 1, 1, 7)


@pytest.mark.parametrize(("head", "given"), [(41, 48), (36, 40), (64, 64)])
def test_on_gpus_heads_of_relative_attention_are_a_multiple_of_eight(
    head: int, given: int, monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    torch.manual_seed(1)
    attention = RelativeAttention(16, 2, 0.0, head_dim=head).double()
    for bias in (attention.r_w_bias, attention.r_r_bias):
        nn.init.normal_(bias)
    x, memory = torch.randn(2, 4, 16).double(), torch.randn(2, 5, 16).double()
    positions = RelativePositions(torch.randn(9, 16).double())
    results = []
    for gpu in (False, True):
        monkeypatch.setattr(dispatch, "is_cpu", lambda x, gpu=gpu: not gpu)
        out = attention(x, memory=memory, positions=positions)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(attention.parameters()))))
    assert [call["dim"] for call in calls] == [given] and calls[0]["scale"] == 1.0
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_on_gpus_every_layer_of_a_model_with_memory_reaches_the_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, calls: list[dict[str, Any]]
) -> None:
    cfg = TransformerXLConfig(n_layer=3, n_head=2, d_model=8, d_head=5, d_inner=12, mem_len=4, tokens_per_sample=4)
    model = TransformerXLDecoder(cfg, 20).eval()
    source = torch.arange(16).view(2, 8)
    monkeypatch.setattr(dispatch, "is_cpu", lambda x: True)
    _, extra = model(source[:, :4])
    wanted, _ = model(source[:, 4:], memory=extra["memory"])
    monkeypatch.setattr(dispatch, "is_cpu", lambda x: False)
    calls.clear()
    found, _ = model(source[:, 4:], memory=extra["memory"])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert [call["dim"] for call in calls] == [8, 8, 8]
