"""Centred notes are read without what all notes share, once written, at the norm of embeddings;
notes end in time."""

from __future__ import annotations

import copy

import naive_notes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from note_batches import DIM, WORDS, batches, dictionary, spans_of, tensors

from fairseq.notes.dictionary import CausalNoteDictionary, NoteDictionary


def centred(kind=NoteDictionary, **more):
    return dictionary(kind, form="centred", **more)


def write(notes, hidden, spans, lengths):
    notes.write(*notes.take(hidden, spans, lengths))


@given(st.lists(batches(), min_size=1, max_size=4), batches(), st.integers(0, 99), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_a_note_is_read_relative_to_the_mean_of_the_written_ones(updates, batch, seed, note_lambda):
    notes = centred(note_lambda=note_lambda, note_gamma=0.3)
    for number, one in enumerate(updates):
        write(notes, *tensors(one, seed + number))
    written = {span[3] for one in updates for span in one[2]}
    x, spans, _ = tensors(batch, seed + 9)
    expected = naive_notes.centred(x, batch[2], notes.table, written, note_lambda)
    torch.testing.assert_close(notes.read(x, spans).double(), expected, rtol=1e-4, atol=1e-4)


@given(st.lists(batches(), min_size=1, max_size=4), st.integers(0, 99), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_moments_are_those_of_the_written_notes(updates, seed, dense):
    notes = centred()
    for number, one in enumerate(updates):
        sums, counts = notes.take(*tensors(one, seed + number))
        notes.write(*((sums.to_dense(), counts.to_dense()) if dense else (sums, counts)))
    rows = notes.table[notes.taken > 0].double()
    expected = torch.cat((rows.sum(0), rows.square().sum()[None], torch.tensor([len(rows)])))
    torch.testing.assert_close(notes.moments, expected, rtol=1e-9, atol=1e-9)


def test_the_first_note_of_a_word_replaces_the_initial_one_and_later_ones_move_it():
    notes, x = centred(note_gamma=0.25, note_half_window=0), torch.randn(2, 4, DIM)
    write(notes, x, spans_of((0, 1, 2, 3)), torch.tensor([4, 4]))
    torch.testing.assert_close(notes.table[3], x[0, 1])
    write(notes, x, spans_of((1, 2, 3, 3)), torch.tensor([4, 4]))
    torch.testing.assert_close(notes.table[3], 0.75 * x[0, 1] + 0.25 * x[1, 2])


def test_a_vector_common_to_all_notes_and_their_scale_change_nothing():
    x, spans = torch.randn(1, 6, DIM), spans_of((0, 1, 3, 2), (0, 4, 5, 5))
    read = []
    for shift, scale in ((0.0, 1.0), (100.0, 1.0), (0.0, 0.01)):
        notes = centred(note_half_window=0)
        hidden = torch.randn(1, WORDS, DIM, generator=torch.Generator().manual_seed(4)) * scale + shift
        write(notes, hidden, spans_of(*((0, w, w + 1, w) for w in range(WORDS))), torch.tensor([WORDS]))
        read.append(notes.read(x, spans))
    torch.testing.assert_close(read[1], read[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(read[2], read[0], rtol=1e-3, atol=1e-3)
    assert (read[0] != x).any(-1)[0].tolist() == [False, True, True, False, True, False]


def test_nothing_is_read_before_two_words_are_written():
    notes, x = centred(), torch.randn(1, 4, DIM)
    assert torch.equal(notes.read(x, spans_of((0, 1, 2, 3))), x)
    write(notes, x, spans_of((0, 1, 2, 3)), torch.tensor([4]))
    assert torch.isfinite(notes.read(x, spans_of((0, 1, 2, 3)))).all()


def test_without_weight_a_centred_note_leaves_the_input_as_it_is():
    notes, x = centred(note_lambda=0.0), torch.randn(2, 4, DIM)
    write(notes, x, spans_of((0, 1, 2, 3), (1, 0, 2, 5)), torch.tensor([4, 4]))
    assert torch.equal(notes.read(x, spans_of((0, 1, 2, 3))), x)


def test_causal_notes_are_centred_where_the_word_is_complete():
    notes, x = centred(CausalNoteDictionary, note_half_window=1), torch.randn(1, 6, DIM)
    spans = spans_of((0, 1, 3, 2), (0, 4, 5, 6))
    write(notes, x, spans, torch.tensor([6]))
    expected = naive_notes.centred(x, [(0, 2, 3, 2), (0, 4, 5, 6)], notes.table, {2, 6}, 0.5)
    torch.testing.assert_close(notes.read(x, spans).double(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_do_not_flow_through_the_norm_or_the_table():
    notes, hidden = centred(note_lambda=0.25, note_half_window=0), torch.randn(1, 4, DIM)
    write(notes, hidden, spans_of((0, 0, 1, 1), (0, 2, 3, 4)), torch.tensor([4]))
    x = torch.randn(1, 4, DIM, requires_grad=True)
    notes.read(x, spans_of((0, 1, 2, 4))).sum().backward()
    assert x.grad is not None and torch.equal(x.grad[0, :, 0], torch.tensor([1.0, 0.75, 1.0, 1.0]))


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.float()])
def test_table_and_moments_keep_their_precision_and_every_bit(move):
    notes = centred()
    write(notes, torch.randn(1, 4, DIM), spans_of((0, 0, 1, 1), (0, 2, 3, 4)), torch.tensor([4]))
    before = copy.deepcopy(notes)
    move(notes)
    for name in ("table", "moments"):
        assert torch.equal(getattr(notes, name), getattr(before, name))
        assert getattr(notes, name).dtype == getattr(before, name).dtype


@pytest.mark.parametrize("form", ["literal", "centred"])
def test_after_the_last_update_with_notes_none_is_read_or_taken(form):
    notes, x = dictionary(form=form, until=2, note_half_window=0), torch.randn(1, 6, DIM)
    spans, lengths = spans_of((0, 1, 3, 2), (0, 4, 5, 6)), torch.tensor([6])
    for update in range(4):
        read = notes.read(x, spans)
        assert torch.equal(read, x) == (update >= 2 or (update == 0 and form == "centred"))
        before = notes.table.clone()
        write(notes, x + update, spans, lengths)
        assert torch.equal(notes.table, before) == (update >= 2)
    assert notes.taken.sum() == 4 and notes.written.max() == 2 and notes.updates == 4


def test_an_unknown_form_is_rejected():
    with pytest.raises(ValueError, match="form 'cantered': must be one of literal, centred"):
        dictionary(form="cantered")


def test_an_average_of_checkpoints_has_the_moments_of_its_table():
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        notes = centred(note_half_window=0)
        write(notes, torch.randn(1, 4, DIM), spans_of((0, 0, 1, 1), (0, 2, 3, seed + 3)), torch.tensor([4]))
        states.append(notes.state_dict())
    mean = {name: (states[0][name] + states[1][name]) / 2 for name in ("table", "moments")}
    notes = centred()
    notes.load_state_dict({**states[1], **mean})
    rows = notes.table[notes.taken > 0].double()
    torch.testing.assert_close(notes.moments[:-2], rows.sum(0))
    assert notes.moments[-2] == pytest.approx(float(rows.square().sum())) and notes.moments[-1] == len(rows)
    again = centred()
    again.load_state_dict(states[1])
    assert torch.equal(again.moments, states[1]["moments"])
