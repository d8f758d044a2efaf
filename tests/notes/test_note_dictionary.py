"""The note dictionary computes the paper's formulas, whatever the spans."""

from __future__ import annotations

import copy
import hashlib

import naive_notes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from note_batches import DIM, WORDS, batches, dictionary, spans_of, tensors

from fairseq.notes.dictionary import CausalNoteDictionary, NoteDictionary, generator_apart

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@given(batches(), st.integers(0, 99), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_reading_is_the_papers_formula_at_rare_words_and_the_identity_elsewhere(batch, seed, note_lambda):
    notes = dictionary(note_lambda=note_lambda)
    x, spans, _ = tensors(batch, seed)
    result = notes.read(x, spans)
    torch.testing.assert_close(result.double(), naive_notes.read(x, batch[2], notes.table, note_lambda), **CLOSE)
    rare = torch.zeros(x.shape[:2], dtype=torch.bool)
    for row, first, end, _ in batch[2]:
        rare[row, first:end] = True
    assert torch.equal(result[~rare], x[~rare])


@given(batches(), st.integers(0, 99), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_with_a_window_tokens_near_rare_words_read_the_mean_of_their_notes(batch, seed, k):
    notes = dictionary(note_lambda=0.3, note_half_window=k, read_window=True)
    x, spans, _ = tensors(batch, seed)
    expected = naive_notes.read_window(x, batch[2], notes.table, 0.3, k)
    torch.testing.assert_close(notes.read(x, spans).double(), expected, **CLOSE)


@given(st.lists(batches(), min_size=1, max_size=3), st.integers(0, 99), st.integers(0, 40), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_an_update_of_several_batches_is_the_moving_average_of_the_papers_notes(batch, seed, k, gamma):
    notes = dictionary(note_gamma=gamma, note_half_window=k)
    before = notes.table.clone()
    literal, sums, counts = [], None, None
    for number, one in enumerate(batch):
        hidden, spans, lengths = tensors(one, seed + number)
        literal += [(s[3], naive_notes.note(hidden, s, one[0][s[0]], k)) for s in one[2]]
        more = notes.take(hidden, spans, lengths)
        sums, counts = more if sums is None else (sums + more[0], counts + more[1])
    notes.write(sums, counts)
    torch.testing.assert_close(notes.table.double(), naive_notes.write(before, literal, gamma), **CLOSE)
    touched = {word for word, _ in literal}
    for word in range(WORDS):
        assert word in touched or torch.equal(notes.table[word], before[word])
        assert int(notes.taken[word]) == sum(w == word for w, _ in literal)


@pytest.mark.parametrize("causal", [False, True])
@given(batches(), st.integers(0, 99), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_notes_of_the_context_leave_the_words_own_tokens_out(causal, batch, seed, k):
    notes = dictionary(CausalNoteDictionary if causal else NoteDictionary, note_half_window=k, context=True)
    before, (hidden, spans, lengths) = notes.table.clone(), tensors(batch, seed)
    every = [(s[3], naive_notes.note(hidden, s, s[2] if causal else batch[0][s[0]], k, True)) for s in batch[2]]
    expected = [(word, note) for word, note in every if note is not None]
    notes.write(*notes.take(hidden, spans, lengths))
    torch.testing.assert_close(notes.table.double(), naive_notes.write(before, expected, 0.1), **CLOSE)
    assert notes.taken.tolist() == [sum(w == word for w, _ in expected) for word in range(WORDS)]


@given(batches(), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_dense_sums_write_what_sparse_ones_do(batch, seed):
    sparse = dictionary()
    dense = copy.deepcopy(sparse)
    hidden, spans, lengths = tensors(batch, seed)
    sums, counts = sparse.take(hidden, spans, lengths)
    sparse.write(sums, counts)
    dense.write(sums.to_dense(), counts.to_dense())
    torch.testing.assert_close(sparse.table, dense.table)
    assert torch.equal(sparse.taken, dense.taken) and torch.equal(sparse.written, dense.written)


def test_a_note_is_exact_beside_states_a_thousand_times_larger():
    notes = dictionary(note_half_window=1, note_gamma=1.0)
    hidden = torch.full((1, 400, DIM), 1e3)
    hidden[0, 300:303] = 1e-3
    notes.write(*notes.take(hidden, spans_of((0, 301, 302, 4)), torch.tensor([400])))
    torch.testing.assert_close(notes.table[4], torch.full((DIM,), 1e-3))


def test_padding_is_in_no_window_even_if_it_is_not_a_number():
    notes = dictionary(note_half_window=5, note_gamma=1.0)
    hidden = torch.ones(1, 6, DIM)
    hidden[0, 4:] = float("nan")
    notes.write(*notes.take(hidden, spans_of((0, 3, 4, 0)), torch.tensor([4])))
    torch.testing.assert_close(notes.table[0], torch.ones(DIM))


def test_overlapping_spans_read_the_mean_of_their_notes_in_any_order():
    notes = dictionary(note_lambda=0.5)
    x = torch.randn(1, 4, DIM)
    spans = spans_of((0, 0, 3, 1), (0, 1, 2, 5))
    result = notes.read(x, spans)
    torch.testing.assert_close(result[0, 1], 0.5 * x[0, 1] + 0.25 * (notes.table[1] + notes.table[5]))
    torch.testing.assert_close(result, notes.read(x, spans.flip(0)))


def test_lambda_zero_reads_nothing_and_gamma_zero_writes_nothing():
    notes = dictionary(note_lambda=0.0, note_gamma=0.0)
    before, x, spans = notes.table.clone(), torch.randn(2, 5, DIM), spans_of((0, 0, 5, 1), (1, 2, 3, 1))
    assert torch.equal(notes.read(x, spans), x)
    notes.write(*notes.take(x, spans, torch.tensor([5, 5])))
    assert torch.equal(notes.table, before)


def test_gradients_reach_embeddings_and_never_the_table():
    notes = dictionary(note_lambda=0.25)
    x = torch.randn(1, 3, DIM, requires_grad=True)
    hidden = notes.read(x, spans_of((0, 1, 2, 0)))
    sums, counts = notes.take(hidden, spans_of((0, 1, 2, 0)), torch.tensor([3]))
    hidden.sum().backward()
    assert torch.equal(x.grad[0, :, 0], torch.tensor([1.0, 0.75, 1.0]))
    assert not list(notes.parameters()) and not sums.requires_grad and not counts.requires_grad


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_notes_stay_in_float32_and_keep_every_bit(move):
    notes = torch.nn.ModuleList([dictionary()])
    before = notes[0].table.clone()
    move(notes)
    assert notes[0].table.dtype == torch.float32 and torch.equal(notes[0].table, before)


def test_notes_of_half_precision_states_are_summed_in_float32():
    notes = dictionary(note_half_window=600, note_gamma=1.0)
    hidden = torch.full((1, 1001, DIM), 1.0, dtype=torch.bfloat16)
    hidden[0, 0] = 0.5
    notes.write(*notes.take(hidden, spans_of((0, 500, 501, 2)), torch.tensor([1001])))
    torch.testing.assert_close(notes.table[2], torch.full((DIM,), 1000.5 / 1001))
    assert notes.read(hidden, spans_of((0, 3, 4, 1))).dtype == torch.bfloat16


def test_initial_notes_follow_the_seed_and_leave_the_backbones_random_numbers_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = dictionary()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.table, dictionary().table)
    assert not torch.equal(first.table[0], torch.randn(DIM))
    torch.manual_seed(6)
    assert not torch.equal(first.table, dictionary().table)


def test_ages_count_updates_since_a_note_was_written():
    notes = dictionary()
    x, lengths = torch.randn(1, 4, DIM), torch.tensor([4])
    for spans in (spans_of((0, 0, 1, 2), (0, 1, 2, 2)), spans_of(), spans_of((0, 0, 1, 3))):
        notes.write(*notes.take(x, spans, lengths))
    assert int(notes.updates) == 3
    assert notes.written.tolist() == [0, 0, 1, 3, 0, 0, 0]
    assert notes.taken.tolist() == [0, 0, 2, 1, 0, 0, 0]


def test_an_update_allocates_nothing_as_large_as_the_table(monkeypatch):
    """Every tensor that is made while notes are read, taken and written is counted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    own = any(tensor.data_ptr() == n.data_ptr() for n in (notes.table,))
                    largest = max(largest, 0 if own else tensor.numel())
            return result

    notes = NoteDictionary(5000, 16)
    x, spans = torch.randn(2, 8, 16), spans_of((0, 1, 3, 4), (1, 5, 8, 4999))
    with Sizes():
        notes.read(x, spans, 3)
        notes.write(*notes.take(x, spans, torch.tensor([8, 8]), 3))
    assert largest == 5000  # counts


def test_inputs_that_are_transposed_views_are_read_as_their_copies():
    notes, x = dictionary(), torch.randn(5, 2, DIM).transpose(0, 1)
    spans = spans_of((0, 1, 3, 4), (1, 0, 2, 2))
    assert torch.equal(notes.read(x, spans), notes.read(x.contiguous(), spans))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int32])
def test_sums_and_counts_of_other_types_are_written_as_those_that_take_returns(kind):
    sums, counts = dictionary().take(torch.randn(2, 5, DIM), spans_of((0, 1, 3, 4), (1, 0, 2, 4)), torch.tensor([5, 4]))
    written = []
    for arguments in (
        (sums, counts),
        (sums.double(), counts.to(kind)),
        (sums.to_dense().double(), counts.to_dense().to(kind)),
    ):
        torch.manual_seed(1)
        notes = dictionary()
        notes.write(*arguments)
        written.append((notes.table, notes.taken))
    for table, taken in written[1:]:
        torch.testing.assert_close(table, written[0][0])
        assert torch.equal(taken, written[0][1]) and taken[4] == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"note_lambda": 1.5},
        {"note_lambda": -0.1},
        {"note_gamma": 2},
        {"note_gamma": -0.1},
        {"note_half_window": -1},
        {"note_half_window": 0, "context": True},
        {"note_lambda": float("nan")},
    ],
)
def test_settings_out_of_range_are_rejected(settings):
    with pytest.raises(ValueError, match="note_"):
        dictionary(**settings)


def test_a_dictionary_without_words_or_width_or_of_another_form_is_rejected():
    with pytest.raises(ValueError, match="0 words"):
        NoteDictionary(0, 4)
    with pytest.raises(ValueError, match="width 0"):
        NoteDictionary(4, 0)
    with pytest.raises(ValueError, match="form 'central'"):
        NoteDictionary(4, 4, form="central")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_limits_of_the_settings_are_valid(share):
    notes = NoteDictionary(1, 1, share, share, 0)
    x = torch.full((1, 3, 1), 5.0)
    before = notes.table.clone()
    mixed = notes.read(x, spans_of((0, 1, 2, 0)))
    torch.testing.assert_close(mixed[0, :, 0], torch.tensor([5.0, (1 - share) * 5 + share * before.item(), 5.0]))
    notes.write(*notes.take(x, spans_of((0, 1, 2, 0)), torch.tensor([3])))
    torch.testing.assert_close(notes.table, (1 - share) * before + share * 5.0)


def test_the_digest_is_that_of_the_words_in_order():
    notes = NoteDictionary(2, 3)
    assert not notes.digest.any()
    assert notes.name_words(["é", "b"]) is notes
    assert bytes(notes.digest.tolist()) == hashlib.sha256("é\nb".encode()).digest()
    with pytest.raises(ValueError, match="3 words for 2 notes"):
        notes.name_words(["a", "b", "c"])


def test_initial_notes_have_the_standard_deviation_asked_for():
    for asked, std in (({}, 0.02), ({"init_std": 3.0}, 3.0)):
        table = NoteDictionary(200, 100, **asked).table
        assert table.std().item() == pytest.approx(std, rel=0.02) and abs(table.mean().item()) < 0.02 * std
        assert table.device.type == "cpu" and table.dtype == torch.float32


def test_generators_of_other_purposes_and_seeds_are_independent_and_of_equal_ones_equal():
    def numbers(seed, purpose):
        torch.manual_seed(seed)
        return tuple(torch.rand(4, generator=generator_apart(purpose)).tolist())

    assert numbers(1, "notes") == numbers(1, "notes")
    assert len({numbers(seed, purpose) for seed in (1, 2, 2**63) for purpose in ("notes", "noise")}) == 6


@pytest.mark.parametrize("form", ["literal", "centred"])
def test_notes_are_neither_read_nor_taken_after_so_many_updates(form):
    notes = NoteDictionary(2, 3, note_half_window=1, form=form, until=2)
    x, spans, lengths = torch.randn(1, 6, 3), spans_of((0, 1, 2, 0), (0, 4, 5, 1)), torch.tensor([6])
    for update in range(4):
        before = notes.table.clone()
        notes.write(*notes.take(x * (update + 1), spans, lengths))
        assert (notes.table != before).any().item() == (update < 2)
        assert (notes.read(x, spans) != x).any().item() == (update < 1)
    assert notes.taken.tolist() == [2, 2] and notes.written.tolist() == [2, 2] and notes.updates == 4


@pytest.mark.parametrize("delay", [0, 1])
def test_causal_notes_are_read_once_written_and_only_where_the_word_is_complete(delay):
    notes = dictionary(CausalNoteDictionary, note_half_window=1, delay=delay)
    x, spans = torch.randn(1, 6, DIM), spans_of((0, 1, 4, 2))
    assert torch.equal(notes.read(x, spans), x)
    notes.write(*notes.take(x, spans, torch.tensor([6])))
    changed = (notes.read(x, spans) != x).any(-1)[0]
    assert changed.tolist() == [i == 3 + delay for i in range(6)]
    if delay:
        at_the_end = spans_of((0, 4, 6, 2))
        assert torch.equal(notes.read(x, at_the_end), x)


def test_causal_notes_are_taken_from_the_word_and_what_is_before_it():
    notes = dictionary(CausalNoteDictionary, note_half_window=2, note_gamma=1.0)
    x = torch.randn(1, 6, DIM)
    notes.write(*notes.take(x, spans_of((0, 3, 5, 2)), torch.tensor([6])))
    torch.testing.assert_close(notes.table[2], x[0, 1:5].mean(0))


def test_causal_notes_have_no_window_to_read_in():
    with pytest.raises(ValueError, match="read_window"):
        dictionary(CausalNoteDictionary, read_window=True)
