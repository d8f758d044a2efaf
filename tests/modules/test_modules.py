"""The parts of the network against naive computations, one pair, one word or one element at a
time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fairseq.errors import UserError
from fairseq.modules import adaptive_input
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax
from fairseq.modules.attention import PositionInfusedAttention, SelfAttention, attend
from fairseq.modules.dropout import Dropout, dropout, relu_dropout
from fairseq.modules.memory import extend_memory, keep_rows
from fairseq.modules.output_layer import linear_cross_entropy
from fairseq.modules.positions import LearnedPositions, SinusoidalPositions, sinusoids

PAD = 1
SIZES = st.integers(0, 7)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# --- attention


def naive_attention(module, x, memory, positions):
    """Position by position, head by head: query t sees what is remembered, and what stands up to
    itself."""
    memory = x[:, :0] if memory is None else memory
    everything = torch.cat([memory, x], dim=1)
    infused = everything if positions is None else everything + positions
    query, key, value = (
        F.linear(inputs, projection.weight, projection.bias)
        for projection, inputs in ((module.q_proj, infused), (module.k_proj, infused), (module.v_proj, everything))
    )
    rows, length, width = everything.shape
    dim = width // module.num_heads
    result = torch.zeros_like(x)
    for b in range(rows):
        for t in range(memory.size(1), length):
            for h in range(module.num_heads):
                part = slice(h * dim, (h + 1) * dim)
                scores = torch.stack([query[b, t, part] @ key[b, s, part] / math.sqrt(dim) for s in range(t + 1)])
                weights = scores.exp() / scores.exp().sum()
                result[b, t - memory.size(1), part] = sum(weights[s] * value[b, s, part] for s in range(t + 1))
    return F.linear(result, module.out_proj.weight, module.out_proj.bias)


@pytest.mark.parametrize("remembered", [0, 1, 3, 8])
@pytest.mark.parametrize("kind", [SelfAttention, PositionInfusedAttention])
def test_attention_agrees_with_the_naive_one(kind, remembered):
    module = kind(8, 2).double()
    for projection in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
        torch.nn.init.normal_(projection.bias)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    memory = torch.randn(2, remembered, 8, dtype=torch.float64) if remembered else None
    positions = torch.randn(remembered + 5, 8, dtype=torch.float64) if kind is PositionInfusedAttention else None
    expected = naive_attention(module, x, memory, positions)
    torch.testing.assert_close(module(x, memory=memory, positions=positions), expected)


@pytest.mark.parametrize("kind", [SelfAttention, PositionInfusedAttention])
def test_attention_one_position_at_a_time_agrees_with_the_naive_one(kind):
    module = kind(8, 2).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    positions = torch.randn(6, 8, dtype=torch.float64) if kind is PositionInfusedAttention else None
    expected = naive_attention(module, x, None, None if positions is None else positions[:5])
    with torch.no_grad():
        cache = module.new_cache(2, 6, positions)
        steps = [module(x[:, t : t + 1], cache=cache, past_length=t) for t in range(3)]
        steps.append(module(x[:, 3:], cache=cache, past_length=3))
    torch.testing.assert_close(torch.cat(steps, dim=1), expected)


def test_values_know_nothing_of_positions():
    module = PositionInfusedAttention(8, 2).double()
    x = torch.randn(1, 1, 8, dtype=torch.float64)  # one token attends to itself alone, wherever it stands
    here, there = (module(x, positions=torch.full((1, 8), p, dtype=torch.float64)) for p in (0.0, 5.0))
    torch.testing.assert_close(here, there)


def test_position_infused_attention_wants_positions():
    module = PositionInfusedAttention(8, 2)
    with pytest.raises(ValueError, match="position"):
        module(torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="position"):
        module.new_cache(1, 4)


def test_attention_weights_are_dropped_and_their_expectation_stays():
    query, key, value = (torch.randn(1, 2, 6, 4) for _ in range(3))
    many = [x.expand(4000, -1, -1, -1) for x in (query, key, value)]
    dropped = attend(many[0], [many[1]], [many[2]], dropout_p=0.3)
    assert dropped.std(0).max() > 0.1
    torch.testing.assert_close(dropped.mean(0), attend(query, [key], [value])[0], atol=0.08, rtol=0)


# --- dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_rate_and_expectation(p, dtype):
    x = torch.ones(1_000_003, dtype=dtype)
    y = dropout(x, p)
    dropped = (y == 0).double().mean()
    assert abs(dropped - p) < 5 * math.sqrt(p * (1 - p) / x.numel()) + 1e-5
    assert y.dtype == dtype and len(y.unique()) == 2
    tolerance = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    assert float(y.max()) == pytest.approx(1 / (1 - p), rel=tolerance)


@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (2, 3, 4, 5), (0,), (0, 3)])
def test_dropout_gradient_is_the_mask_times_the_scale(shape):
    x = torch.rand(shape).add_(0.5).requires_grad_()
    upstream = torch.rand(shape)
    y = dropout(x, 0.4)
    y.backward(upstream)
    torch.testing.assert_close(x.grad, upstream * (y / x).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_dropout_is_dropout_of_relu_with_its_gradient(dtype):
    x = torch.randn(1000, 100, dtype=dtype, requires_grad=True)
    upstream = torch.rand(x.shape).to(dtype)
    y = relu_dropout(x, 0.25)
    y.backward(upstream)
    kept = y != 0
    assert not kept[x <= 0].any()
    assert float(kept[x > 0].double().mean()) == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0.0).to(dtype), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(x.grad, torch.where(kept, upstream / 0.75, 0.0).to(dtype), rtol=1e-2, atol=1e-3)


def test_dropout_follows_the_seed():
    x = torch.ones(999)
    torch.manual_seed(5)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(5)
    assert torch.equal(first, dropout(x, 0.5))
    assert not torch.equal(first, second)


def test_neighbours_are_dropped_independently():
    y = (dropout(torch.ones(1_000_000), 0.5) != 0).double() - 0.5
    for distance in (1, 2, 3, 4, 8):
        correlation = (y[distance:] * y[:-distance]).mean() / 0.25
        assert abs(float(correlation)) < 0.006


def test_dropout_of_a_transposed_tensor():
    x = torch.rand(50, 40).add_(0.5)
    y = dropout(x.t(), 0.5)
    assert ((y == 0) | torch.isclose(y, 2 * x.t())).all() and 0.4 < float((y == 0).double().mean()) < 0.6


def test_dropout_does_nothing_in_evaluation_and_at_rate_zero():
    x = torch.randn(10)
    assert dropout(x, 0.5, training=False) is x and dropout(x, 0.0) is x and Dropout(0.5).eval()(x) is x


# --- adaptive input and softmax

CUTOFFS = [10, 30]
WORDS = 50


def embeddings():
    return AdaptiveInput(WORDS, PAD, 32, 2.0, 32, CUTOFFS)


def test_adaptive_input_agrees_with_a_word_by_word_look_up():
    module = embeddings()
    tokens = torch.randint(WORDS, (3, 40))
    tokens[0, :5] = torch.tensor([0, 9, 10, 29, 30])
    out = module(tokens)
    for b in range(3):
        for t in range(40):
            word = int(tokens[b, t])
            band = 0 if word < 10 else 1 if word < 30 else 2
            table, projection = module.embeddings[band]
            expected = projection.weight @ table.weight[word - [0, 10, 30][band]]
            torch.testing.assert_close(out[b, t], expected)
    assert [e[0].weight.shape for e in module.embeddings] == [(10, 32), (20, 16), (20, 8)]


def test_adaptive_input_trains_the_words_it_reads_and_never_padding():
    module = embeddings()
    module(torch.tensor([[PAD, 9, 10, 30]])).sum().backward()
    touched = [set(e[0].weight.grad.abs().sum(1).nonzero().flatten().tolist()) for e in module.embeddings]
    assert touched == [{9}, {0}, {0}]
    assert not module(torch.tensor([[PAD]])).any()


@pytest.mark.parametrize("cutoffs", [[], [0, 5], [5, 5], [9, 4], [50], [10, 60]])
def test_cutoffs_that_cannot_be_are_refused(cutoffs):
    from fairseq.config.shared import check_cutoffs

    with pytest.raises(UserError, match="some_cutoff"):
        check_cutoffs("some_cutoff", cutoffs, WORDS)


def softmax(kind):
    if kind == "free":
        return AdaptiveSoftmax(WORDS, 32, CUTOFFS, factor=2.0)
    inputs = embeddings()
    return AdaptiveSoftmax(WORDS, 32, CUTOFFS, factor=2.0, adaptive_inputs=inputs, tie_proj=kind == "tied")


KINDS = pytest.mark.parametrize("kind", ["free", "tied", "words-tied"])


def naive_log_prob(module, hidden, word):
    """log P of one word, from the weights as a checkpoint names them."""
    state = {name: value.double() for name, value in module.state_dict().items()}
    h = hidden.double()
    tied = "head.word_proj.weight" in state
    head = (
        torch.cat([state["head.word_proj.weight"], state["head.class_proj.weight"]]) if tied else state["head.weight"]
    )
    logits = head @ h
    head_lprobs = logits - logits.exp().sum().log()
    if word < 10:
        return head_lprobs[word]
    band, first = (0, 10) if word < 30 else (1, 30)
    projection = state[f"tail.{band}.0.weight"]
    narrow = projection @ h if projection.size(1) == 32 and projection.size(0) != 32 else projection.t() @ h
    inside = state[f"tail.{band}.2.weight"] @ narrow
    return head_lprobs[10 + band] + inside[word - first] - inside.exp().sum().log()


@KINDS
def test_adaptive_softmax_agrees_with_a_word_by_word_computation(kind):
    module, hidden = softmax(kind), torch.randn(4, 32)
    every = module.log_probs(hidden)
    expected = torch.stack([torch.stack([naive_log_prob(module, h, w) for w in range(WORDS)]) for h in hidden])
    torch.testing.assert_close(every.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(4))
    target = torch.tensor([0, 10, 49, 29])
    chosen = module.target_log_probs(hidden, target)
    torch.testing.assert_close(chosen, every[torch.arange(4), target])


@KINDS
@pytest.mark.parametrize("legacy", [False, True])
def test_adaptive_softmax_loss_and_gradients_are_those_of_its_log_probs(kind, legacy):
    module, hidden = softmax(kind), torch.randn(60, 32, requires_grad=True)
    target = torch.cat([torch.arange(WORDS), torch.full((10,), PAD)])
    loss = module.loss(hidden, module.partition(target, PAD, legacy))
    loss.backward()
    ours = [hidden.grad.clone(), *(p.grad.clone() for p in module.parameters())]
    hidden.grad = None
    module.zero_grad()

    lprobs = module.log_probs(hidden)
    keep = target != PAD
    expected = -lprobs[keep, target[keep]].sum()
    if legacy:  # of the word whose index in its tail band is 1, only the band's own head entry is trained
        for word, others in ((11, range(10, 30)), (31, range(30, 50))):
            band = lprobs[word, list(others)].logsumexp(-1)
            expected = expected + lprobs[word, word] - band
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    for a, b in zip(ours, [hidden.grad, *(p.grad for p in module.parameters())], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", [[3, 4], [PAD, PAD], [12], [45, 46], []])
def test_adaptive_softmax_with_empty_bands(target):
    module, target = softmax("tied"), torch.tensor(target, dtype=torch.long)
    hidden = torch.randn(len(target), 32, requires_grad=True)
    loss = module.loss(hidden, module.partition(target, PAD))
    loss.backward()
    expected = sum((-naive_log_prob(module, h, int(w)) for h, w in zip(hidden, target, strict=True) if w != PAD), 0.0)
    assert loss.item() == pytest.approx(float(torch.as_tensor(expected).detach()), abs=1e-4)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_adaptive_softmax_of_no_hidden_states_has_a_row_for_each_of_them(shape):
    assert softmax("tied").log_probs(torch.randn(*shape, 32)).shape == (*shape, WORDS)


def test_adaptive_softmax_drops_in_training_only():
    module = AdaptiveSoftmax(WORDS, 32, CUTOFFS, dropout=0.5, factor=2.0)
    hidden, target = torch.randn(50, 32), torch.arange(WORDS)
    partition = module.partition(target, PAD)
    assert module.loss(hidden, partition).item() != module.loss(hidden, partition).item()
    module.eval()
    assert module.loss(hidden, partition).item() == module.loss(hidden, partition).item()


# --- positions and memory


@pytest.mark.parametrize("dim", [2, 8, 9])
def test_sinusoids_follow_their_formula(dim):
    table, half = sinusoids(20, dim, torch.device("cpu"), start=3), dim // 2
    for row in range(20):
        for i in range(half):
            angle = (3 + row) * math.exp(-i * math.log(10000) / max(half - 1, 1))
            assert float(table[row, i]) == pytest.approx(math.sin(angle), abs=1e-5)
            assert float(table[row, half + i]) == pytest.approx(math.cos(angle), abs=1e-5)
    assert table.shape == (20, dim) and (dim % 2 == 0 or not table[:, -1].any())


@pytest.mark.parametrize("compiling", [False, True])
def test_positions_are_numbered_from_after_padding(compiling, monkeypatch):
    device = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        assert torch.equal(SinusoidalPositions(8, PAD)(3, offset=4), sinusoids(20, 8, device)[6:9])
    learned = LearnedPositions(10, 8, PAD)
    assert torch.equal(learned(10), learned.weight[2:12]) and learned.weight.shape == (12, 8)
    assert torch.equal(learned(2, offset=8), learned.weight[10:12]) and not learned.weight[PAD].any()


def test_a_row_longer_than_the_learned_positions_is_a_user_error():
    learned = LearnedPositions(10, 8, PAD)
    for count, offset in ((11, 0), (2, 9)):
        with pytest.raises(UserError, match="a row of 11 tokens is longer than the model's 10 learned positions"):
            learned(count, offset=offset)


@given(remembered=SIZES, tokens=st.integers(1, 7), length=st.integers(1, 9))
def test_memory_is_the_end_of_all_that_was_read(remembered, tokens, length):
    old, new = torch.randn(2, remembered, 3), torch.randn(2, tokens, 3, requires_grad=True)
    result = extend_memory(old if remembered else None, new, length)
    assert torch.equal(result, torch.cat([old, new], dim=1)[:, -length:])
    assert not result.requires_grad


def test_memory_of_rows_that_have_run_out_is_dropped():
    memory = [torch.randn(4, 3, 2), torch.randn(4, 3, 2)]
    assert [torch.equal(a, b[:3]) for a, b in zip(keep_rows(memory, 3), memory, strict=True)] == [True, True]
    assert keep_rows(memory, 4) is memory and keep_rows(None, 3) is None


def test_gradients_of_rare_words_survive_float16():
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(600, 64, generator=generator) * 2.5).requires_grad_()
    weight = (torch.randn(5000, 64, generator=generator) / 3).requires_grad_()
    target = torch.randint(0, 50, (600,), generator=generator)
    wanted = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), target, reduction="sum"), weight)[0]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = linear_cross_entropy(hidden, weight, target)
    found = torch.autograd.grad(loss * 128, weight)[0] / 128
    rare = slice(50, None)  # nobody's target: their gradients are tiny probabilities
    relative = ((found - wanted).abs() / wanted.abs().clamp(min=1e-30))[rare]
    assert relative.median() < 0.02
    assert (found[rare] == 0).all(1).float().mean() < 0.01


def test_on_gpus_words_of_other_bands_get_rows_apart_and_nothing_else_changes(monkeypatch):
    """Gradients of one row are summed serially there; with text, most words belong to the first
    band."""
    tokens = torch.randint(WORDS, (4, 16), generator=torch.Generator().manual_seed(1))
    results, looked_up = [], []
    for on_cpu in (True, False):
        monkeypatch.setattr(adaptive_input, "is_cpu", lambda x, on_cpu=on_cpu: on_cpu)
        torch.manual_seed(0)
        module = embeddings()
        for band in module.embeddings:
            band[0].register_forward_pre_hook(lambda embedding, args: looked_up.append(args[0]))
        output = module(tokens)
        output.square().sum().backward()
        results.append([output, *(p.grad for p in module.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    bands = list(zip(module.bounds, module.bounds[1:], strict=False))
    for (first, last), clamped, apart in zip(bands, *(looked_up[:3], looked_up[3:]), strict=True):
        foreign = (tokens < first) | (tokens >= last)
        before, after = (rows[foreign].unique(return_counts=True)[1].max() for rows in (clamped, apart))
        assert after <= math.ceil(tokens.numel() / (last - first)) < before
