"""Batches of rows with rare words, for hypothesis, and small note dictionaries."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from fairseq.notes.dictionary import NoteDictionary

WORDS, DIM = 7, 3


@st.composite
def batches(draw):
    """Rows of words, rare or not, with padding behind them: lengths, longest row, spans."""
    lengths, spans = [], []
    for row in range(draw(st.integers(1, 3))):
        place = 0
        for size, word in draw(st.lists(st.tuples(st.integers(1, 4), st.integers(-3, WORDS - 1)), min_size=1)):
            if word >= 0:
                spans.append((row, place, place + size, word))
            place += size
        lengths.append(place)
    spans = draw(st.permutations(spans))
    return lengths, max(lengths) + draw(st.integers(0, 3)), spans


def tensors(batch, seed):
    lengths, tokens, spans = batch
    x = torch.randn(len(lengths), tokens, DIM, generator=torch.Generator().manual_seed(seed)) * 3
    return x, torch.tensor(spans, dtype=torch.int64).view(-1, 4), torch.tensor(lengths)


def dictionary(kind=NoteDictionary, **settings):
    return kind(WORDS, DIM, init_std=1.0, **settings)


def spans_of(*spans):
    return torch.tensor(spans, dtype=torch.int64).view(-1, 4)
