"""No token of a causal model with notes sees its future, whatever the future is."""

from __future__ import annotations

import copy
import itertools

import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq.notes.dictionary import CausalNoteDictionary
from fairseq.notes.extension import give_notes

TOKENS, ROWS, FIRST = 16, 2, 10
MARKED = FIRST + 6
"""Symbols from here on are marked: they end a word, or in the other kind of subwords begin one."""
ARCHS = {
    "baseline": "--arch transformer_lm_tiny --decoder-layers 2",
    "shortformer": "--arch shortformer_tiny --decoder-layers 2 --tokens-from-prev 16",
    "transformer_xl": "--arch transformer_xl_tiny --n-layer 2 --mem-len 16",
}
"""The three models; two layers, so that a token could hear of its future from another."""


def words_of(row, delay):
    """First token and end of each word that is known to be whole in *row*."""
    bounds = [i + 1 - delay for i, symbol in enumerate(row) if symbol >= MARKED]
    bounds = bounds if delay else [0, *bounds]
    return itertools.pairwise(bounds)


def spans_of(tokens, delay):
    """Every whole word of at least two tokens is rare."""
    found = []
    for number, row in enumerate(tokens.tolist()):
        for first, end in words_of(row, delay):
            if end - first > 1:
                found.append((number, first, end, sum(row[first:end]) % 7))
    return torch.tensor(found, dtype=torch.int64).view(-1, 4)


def run(model, segments):
    """Hidden states of all segments, and of each segment the notes that its words give."""
    memory, hidden, notes = None, [], []
    for tokens in segments:
        spans = spans_of(tokens, model.notes.delay)
        out, extra = model(tokens, memory=memory, spans=spans)
        memory = extra.get("memory")
        hidden.append(out)
        notes.append({tuple(s[:3]): v for s, v in zip(spans.tolist(), extra["notes"][0]._values(), strict=True)})
    return hidden, notes


@pytest.fixture(scope="module", params=ARCHS)
def model(request):
    """A model with notes that were written, and read with a weight that no test can overlook."""
    flags = ARCHS[request.param]
    model = runs.model_of("--tokens-per-sample 16", flags, "--cpu --criterion adaptive_loss --max-tokens 64").eval()
    dim = model.embed(torch.full((1, 1), FIRST)).size(-1)
    give_notes(model, CausalNoteDictionary(7, dim, 0.5, note_half_window=3, init_std=1.0))
    model.notes.taken += 1
    return model


@given(st.integers(0, 10**6), st.integers(0, TOKENS - 1), st.sampled_from([0, 1]), st.sampled_from([0, 1]))
@settings(max_examples=30, deadline=None)
def test_another_future_changes_neither_states_nor_notes_before_it(model, seed, place, segment, delay):
    model.notes.delay = delay
    chance = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(FIRST, FIRST + 10, shape, generator=chance)  # noqa: E731
    segments = [draw(ROWS, TOKENS) for _ in range(2)]
    other = copy.deepcopy(segments)
    other[segment][:, place + 1 :] = draw(ROWS, TOKENS - place - 1)
    other[segment + 1 :] = [draw(ROWS, TOKENS) for _ in other[segment + 1 :]]
    with torch.no_grad():
        (hidden, notes), (changed, others) = run(model, segments), run(model, other)
    for number in range(segment + 1):
        upto = TOKENS if number < segment else place + 1
        torch.testing.assert_close(hidden[number][:, :upto], changed[number][:, :upto], rtol=0, atol=1e-5)
        for span, note in notes[number].items():
            if span[2] + delay <= upto:
                torch.testing.assert_close(note, others[number][span], rtol=0, atol=1e-5)


def test_the_test_would_see_a_note_that_is_read_too_early(model):
    model.notes.delay = 0
    tokens = torch.full((1, TOKENS), MARKED)
    tokens[0, 4:7] = torch.tensor([FIRST, FIRST + 1, MARKED])
    with torch.no_grad():
        plain = model(tokens)[0]
        noted = model(tokens, spans=torch.tensor([[0, 4, 7, 1]]))[0]
    differs = (plain - noted).abs().amax(-1)[0] > 1e-5
    assert differs.tolist() == [i >= 6 for i in range(TOKENS)]
