"""Transformer-XL: its attention, memory and output against what the paper's equations say, pair by
pair."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fairseq.models.transformer_xl import TransformerXLDecoder
from fairseq.models.transformer_xl_settings import TransformerXLConfig
from fairseq.modules.attention import CAUSAL
from fairseq.modules.dropout import variational_dropout
from fairseq.modules.positions import distance_sinusoids
from fairseq.modules.relative_attention import RelativeAttention, RelativePositions, ShawAttention, shift

VOCABULARY = 29
SMALL = TransformerXLConfig(
    n_layer=3, n_head=2, d_model=8, d_head=3, d_inner=12, dropout=0.0, mem_len=5, tokens_per_sample=4, untie_r=True
)
KINDS = {
    "relative": {},
    "pre-norm": {"pre_lnorm": True},
    "clamped": {"clamp_len": 3},
    "same length": {"same_length": True},
    "shaw": {"position_encoding": "shaw", "max_relative_length": 6},
    "zeros": {"memory_start": "zeros"},
    "bands": {"cutoffs": [5, 12], "div_val": 2, "tie_projs": "1"},
    "untied": {"cutoffs": [5, 12], "d_embed": 6, "tie_weight": False},
}


def decoder(seed: int = 1, spread: float = 0.5, **changes: Any) -> TransformerXLDecoder:
    """A small model in float64 with weights far from their usual size, so that nothing vanishes."""
    torch.manual_seed(seed)
    made = TransformerXLDecoder(replace(SMALL, **changes), VOCABULARY).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, spread)
    return made


def tokens(rows: int, count: int, seed: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def read(model: TransformerXLDecoder, source: Tensor, segment: int) -> Tensor:
    """Hidden states of *source* read by segments with memory."""
    memory, hidden = None, []
    for start in range(0, source.size(1), segment):
        states, extra = model(source[:, start : start + segment], memory=memory)
        memory = extra["memory"]
        hidden.append(states)
    return torch.cat(hidden, dim=1)


# Attention, pair by pair


def sinusoid(distance: int, dim: int) -> Tensor:
    angles = [distance * 10000 ** (-2 * k / dim) for k in range(dim // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def relative_scores(attention: RelativeAttention, x: Tensor, memory: Tensor, clamp: int | None) -> dict[str, Tensor]:
    """The terms (a) to (d) of §3.3 for one row, one (head, query, key) at a time; what lies ahead
    is 0."""
    everything = torch.cat([memory, x])
    dim = attention.head_dim
    terms = {name: torch.zeros(attention.num_heads, len(x), len(everything), dtype=torch.float64) for name in "abcd"}
    for h in range(attention.num_heads):
        rows = slice(h * dim, (h + 1) * dim)
        w_q, w_ke, w_kr = (p.weight[rows] for p in (attention.q_proj, attention.k_proj, attention.r_proj))
        u, v = attention.r_w_bias[h], attention.r_r_bias[h]
        for i in range(len(x)):
            for j in range(len(memory) + i + 1):
                distance = len(memory) + i - j
                r = w_kr @ sinusoid(distance if clamp is None else min(distance, clamp), x.size(1))
                key, query = w_ke @ everything[j], w_q @ x[i]
                for name, value in zip("abcd", (query @ key, query @ r, u @ key, v @ r), strict=True):
                    terms[name][h, i, j] = value / math.sqrt(dim)
    return terms


def attended(attention: Any, scores: Tensor, hidden: Tensor, everything: Tensor) -> Tensor:
    """The attention's output for *scores* [H, T, K], where *hidden* says which keys a query must
    not see."""
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    values = (everything @ attention.v_proj.weight.T).view(len(everything), attention.num_heads, -1)
    return torch.einsum("htk,khd->thd", weights, values).flatten(1) @ attention.out_proj.weight.T


def relative_attention(clamp: int | None, seed: int = 3) -> tuple[RelativeAttention, Tensor, Tensor, RelativePositions]:
    torch.manual_seed(seed)
    attention = RelativeAttention(8, 2, 0.0, head_dim=3).double()
    for bias in (attention.r_w_bias, attention.r_r_bias):
        nn.init.normal_(bias)
    x, memory = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    table = distance_sinusoids(9, 8, torch.device("cpu"), clamp).double()
    return attention, x, memory, RelativePositions(table)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("clamp", [None, 3])
def test_relative_attention_is_the_equation_for_every_pair(clamp: int | None, gradient: bool) -> None:
    attention, x, memory, positions = relative_attention(clamp)
    with torch.set_grad_enabled(gradient):
        found = attention(x, memory=memory, positions=positions)
    for row in range(2):
        terms = relative_scores(attention, x[row], memory[row], clamp)
        future = torch.ones(4, 9, dtype=torch.bool).triu(6)
        wanted = attended(attention, sum(terms.values()), future, torch.cat([memory[row], x[row]]))
        torch.testing.assert_close(found[row], wanted, atol=1e-6, rtol=0)  # the table is float32


def test_the_four_terms_are_told_apart() -> None:
    attention, x, memory, positions = relative_attention(None)
    found = attention.terms(x, memory, positions)
    for row in range(2):
        for name, wanted in relative_scores(attention, x[row], memory[row], None).items():
            torch.testing.assert_close(found[name][row], wanted, atol=1e-6, rtol=0)


def test_weights_to_look_at_are_those_that_attention_uses() -> None:
    attention, x, memory, positions = relative_attention(None)
    weights = attention.weights(x, memory, positions)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 4, dtype=torch.float64))
    values = attention._heads(attention.v_proj(torch.cat([memory, x], dim=1)))
    wanted = attention.out_proj((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, memory=memory, positions=positions), wanted)


@pytest.mark.parametrize("rows", [3, 20])
def test_shaw_attention_is_its_equation_for_every_pair(rows: int) -> None:
    torch.manual_seed(4)
    attention = ShawAttention(8, 2, 0.0, head_dim=3, count=rows).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_()
    x, memory = torch.randn(1, 4, 8, dtype=torch.float64), torch.randn(1, 5, 8, dtype=torch.float64)
    found = attention(x, memory=memory, positions=RelativePositions())[0]
    everything, scores = torch.cat([memory[0], x[0]]), torch.zeros(2, 4, 9, dtype=torch.float64)
    for h in range(2):
        part = slice(3 * h, 3 * h + 3)
        for i in range(4):
            for j in range(5 + i + 1):
                row = max(0, rows - 1 - (5 + i - j))  # the last row is distance 0
                query, key = attention.q_proj.weight[part] @ x[0, i], attention.k_proj.weight[part] @ everything[j]
                score = (query + attention.r_w_bias[h]) @ key + query @ attention.r_emb[row, h]
                scores[h, i, j] = (score + attention.r_bias[row, h]) / math.sqrt(3)
    wanted = attended(attention, scores, torch.ones(4, 9, dtype=torch.bool).triu(6), everything)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (4, 4), (3, 7)])
def test_shifting_moves_each_row_to_its_distances(queries: int, keys: int) -> None:
    raw = torch.randn(2, 3, queries, keys, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    bias = torch.zeros(queries, keys, dtype=torch.float64).masked_fill(~mask, -math.inf)
    found = shift(raw, bias)
    for i in range(queries):
        for j in range(keys - queries + i + 1):
            torch.testing.assert_close(found[:, :, i, j], raw[:, :, i, j + queries - 1 - i].t())
    assert bool((found[:, :, bias == -math.inf] == -math.inf).all())
    assert torch.autograd.gradcheck(lambda r: shift(r, bias).softmax(-1), raw)


def test_shifting_by_strides_is_shifting_by_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, bias = torch.randn(2, 3, 4, 9, requires_grad=True), CAUSAL.bias(4, 9, torch.device("cpu"))
    weights = torch.randn(3, 2, 4, 9)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        shifted = shift(raw, bias)
        results.append((shifted, *torch.autograd.grad((shifted.softmax(-1) * weights).sum(), raw)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_the_fused_kernel_of_other_devices_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused attention with the scores of distances as additive bias, as GPUs and compiled
    models have it."""
    attention, x, memory, positions = relative_attention(None)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        output = attention(x, memory=memory, positions=positions)
        results.append((output, *torch.autograd.grad(output.square().sum(), list(attention.parameters()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_a_batch_do_not_change_one_another(dtype: torch.dtype, gradient: bool) -> None:
    attention, x, memory, positions = relative_attention(None)
    attention, x, memory = attention.to(dtype), x.to(dtype), memory.to(dtype)
    with torch.set_grad_enabled(gradient):
        together = attention(x, memory=memory, positions=positions)
        apart = [attention(x[i : i + 1], memory=memory[i : i + 1], positions=positions) for i in range(2)]
    torch.testing.assert_close(torch.cat(apart), together)


def test_attention_dropout_does_not_depend_on_gradients_being_wanted() -> None:
    attention, x, memory, positions = relative_attention(None)
    attention.dropout = 0.5
    results = []
    for gradient in (True, False):
        torch.manual_seed(1)
        with torch.set_grad_enabled(gradient):
            results.append(attention.train()(x, memory=memory, positions=positions))
    assert torch.equal(*results)
    assert not torch.equal(results[0], attention.eval()(x, memory=memory, positions=positions))


@pytest.mark.parametrize("kind", ["relative", "pre-norm", "shaw", "clamped"])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    model = decoder(spread=0.3, **KINDS[kind]).train()
    source, weights = tokens(2, 8), torch.randn(2, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        memory = model(source[:, :4])[1]["memory"]
    chosen = [p for n, p in model.named_parameters() if any(s in n for s in ("layers.1.", "embeddings"))]
    gradients = torch.autograd.grad((model(source[:, 4:], memory=memory)[0] * weights).sum(), chosen)
    generator = torch.Generator().manual_seed(6)
    for parameter, gradient in zip(chosen, gradients, strict=True):
        direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                values.append(float((model(source[:, 4:], memory=memory)[0] * weights).sum()))
                parameter.sub_(direction, alpha=step)
        slope = (values[0] - values[1]) / 2e-6
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("changes", [{}, KINDS["bands"], KINDS["untied"]])
def test_the_softmax_is_its_formula_and_so_are_its_gradients(changes: dict[str, Any]) -> None:
    model = decoder(**changes).train()
    softmax = model.adaptive_softmax
    hidden = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    target = torch.arange(20) + 5
    bounds = [0, *changes.get("cutoffs", []), VOCABULARY]

    def logits(band: int, extra: list[Tensor] = []) -> Tensor:  # noqa: B006
        output = softmax.bands[band]
        narrow = hidden if output.projection is None else hidden @ output.projection
        weight = torch.cat([output.weight, *extra[:1]])
        return (narrow @ weight.T + torch.cat([output.bias, *extra[1:]])).log_softmax(-1)

    clusters = [] if softmax.cluster_weight is None else [softmax.cluster_weight, softmax.cluster_bias]
    head = logits(0, clusters)
    parts = [head[:, : bounds[1]]]
    parts += [head[:, bounds[1] + b : bounds[1] + b + 1] + logits(b + 1) for b in range(len(bounds) - 2)]
    lprobs = torch.cat(parts, dim=1)
    torch.testing.assert_close(lprobs.exp().sum(-1), torch.ones(20, dtype=torch.float64))
    torch.testing.assert_close(softmax.log_probs(hidden).double(), lprobs, atol=1e-5, rtol=1e-5)
    wanted = lprobs.gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(softmax.target_log_probs(hidden, target).double(), wanted, atol=1e-5, rtol=1e-5)
    parameters = [hidden, *softmax.parameters()]
    found = torch.autograd.grad(softmax.loss(hidden, softmax.partition(target, -1)), parameters)
    for one, other in zip(found, torch.autograd.grad(-wanted.sum(), parameters), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


# Memory


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("same length", "zeros")])
def test_a_segment_with_memory_equals_one_long_segment_without_gradient(kind: str) -> None:
    model = decoder(mem_len=8, **KINDS[kind])
    source = tokens(2, 12)
    with torch.no_grad():
        whole = model(source)[0]
        assert model(source)[1]["memory"][0].shape == (2, 8, 8)
    memory = model(source[:, :8])[1]["memory"]
    assert not any(layer.requires_grad for layer in memory)
    torch.testing.assert_close(model(source[:, 8:], memory=memory)[0], whole[:, 8:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("segment", [1, 3, 4, 12])
def test_memory_that_holds_everything_makes_segments_invisible(segment: int) -> None:
    model = decoder(mem_len=12)
    with torch.no_grad():
        torch.testing.assert_close(read(model, tokens(2, 12), segment), model(tokens(2, 12))[0], atol=1e-6, rtol=1e-6)


def test_memory_is_the_last_inputs_of_every_layer_and_no_gradient_passes() -> None:
    model = decoder(mem_len=5).train()
    first = model(tokens(1, 4))[1]["memory"]
    second = model(tokens(1, 4, seed=9), memory=first)[1]["memory"]
    torch.testing.assert_close(second[0][:, 1:], model.embed(tokens(1, 4, seed=9)))
    for old, new in zip(first, second, strict=True):
        assert torch.equal(new[:, :1], old[:, 3:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 2, 4])
def test_cached_equals_uncached(kind: str, step: int) -> None:
    """Keys and values kept, a token or several at a time, against everything computed anew."""
    model = decoder(**KINDS[kind])
    source = tokens(2, 14)
    with torch.inference_mode():
        cache, hidden = model.new_cache(2), []
        for start in range(0, 14, 4):
            part = source[:, start : start + 4]
            hidden += [model(part[:, i : i + step], cache=cache)[0] for i in range(0, part.size(1), step)]
            cache.next_segment()
        torch.testing.assert_close(torch.cat(hidden, dim=1), read(model, source, 4), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("encoding", ["relative", "shaw", "absolute", "learned"])
def test_a_row_does_not_depend_on_the_length_of_the_rows_beside_it(encoding: str) -> None:
    model = decoder(mem_len=0, position_encoding=encoding, max_relative_length=3)
    model.padding_idx = 1
    batch = tokens(3, 6).clamp(min=2)
    batch[1, 4:] = batch[2, 1:] = model.padding_idx
    with torch.no_grad():
        together = model(batch)[0]
        for row, length in enumerate((6, 4, 1)):
            torch.testing.assert_close(together[row, :length], model(batch[row : row + 1, :length])[0][0])


@pytest.mark.parametrize("encoding", ["absolute", "learned"])
def test_reading_anew_stands_in_for_a_cache_where_positions_move(encoding: str) -> None:
    model = decoder(mem_len=0, position_encoding=encoding, max_relative_length=3)
    source = tokens(2, 4)
    with torch.inference_mode():
        cache = model.new_cache(2)
        for end in range(1, 5):
            found = model(source[:, end - 1 : end], cache=cache)[0]
            torch.testing.assert_close(found, model(source[:, :end])[0][:, -1:])


def test_same_length_lets_every_query_see_as_many_keys() -> None:
    model = decoder(same_length=True, n_layer=1)
    source = tokens(1, 12)
    with torch.no_grad():
        before = read(model, source, 4)
        changed = source.clone()
        changed[0, 4] = (changed[0, 4] + 1) % VOCABULARY
        after = read(model, changed, 4)
    seen = (before != after).any(-1)[0]
    assert seen.tolist() == [4 <= i < 4 + 5 for i in range(12)]  # one layer: the token and the 4 after it


def test_clamped_distances_are_all_alike() -> None:
    table = distance_sinusoids(6, 8, torch.device("cpu"), 2)
    assert torch.equal(table[0], table[3]) and not torch.equal(table[3], table[4])


def test_every_training_step_sees_the_masks_of_its_rows() -> None:
    x = torch.ones(3, 5, 400)
    dropped = variational_dropout(x, 0.5)
    assert torch.equal(dropped, dropped[:, :1].expand(-1, 5, -1))
    assert not torch.equal(dropped[0], dropped[1])
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(variational_dropout(x, 0.5, training=False), x)


# Biases u and v


def test_shared_biases_belong_to_the_decoder_and_are_named_with_every_layer_in_checkpoints() -> None:
    model = decoder(untie_r=False)
    owned = [name for name, _ in model.named_parameters() if name.endswith(("r_w_bias", "r_r_bias"))]
    assert owned == ["attention_biases.r_w_bias", "attention_biases.r_r_bias"]
    state = model.state_dict()
    for name in ("r_w_bias", "r_r_bias"):
        layers = [state.pop(f"layers.{i}.self_attn.{name}") for i in range(3)]
        assert all(layer.data_ptr() == layers[0].data_ptr() for layer in layers)
    assert not any(name.endswith(("r_w_bias", "r_r_bias")) for name in state)


def test_shared_biases_are_numbered_as_parameters_of_the_first_layer() -> None:
    """Optimizer states and averages of earlier checkpoints are lists in the order of parameters."""
    shared, own = decoder(untie_r=False), decoder(untie_r=True)
    first = [name.replace("attention_biases", "layers.0.self_attn") for name, _ in shared.named_parameters()]
    later = ("layers.1.self_attn.r_", "layers.2.self_attn.r_")
    kept = [n for n, _ in own.named_parameters() if "proj" in n or not n.startswith(later)]
    assert first == kept
    named = [n for n in shared.state_dict() if "proj" in n or not n.startswith(later)]
    assert [n for n in named if n in first] == first


def test_a_state_dict_with_biases_in_every_layer_loads_strictly() -> None:
    model, other = decoder(untie_r=False), decoder(untie_r=False, seed=7)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    state = model.state_dict()
    del state["layers.1.self_attn.r_w_bias"]
    with pytest.raises(RuntimeError, match=r"layers.0.self_attn.r_w_bias|attention_biases.r_w_bias"):
        other.load_state_dict(state)


def test_shared_biases_get_the_gradients_of_all_layers() -> None:
    shared, own = decoder(untie_r=False).train(), decoder(untie_r=True).train()
    own.load_state_dict(shared.state_dict())
    source = tokens(2, 4)
    torch.testing.assert_close(shared(source)[0], own(source)[0])
    for model in (shared, own):
        model(source)[0].square().sum().backward()
    for name in ("r_w_bias", "r_r_bias"):
        wanted = sum(getattr(layer.self_attn, name).grad for layer in own.layers)
        torch.testing.assert_close(getattr(shared.attention_biases, name).grad, wanted)
