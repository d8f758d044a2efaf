"""Notes of pairs of tokens and of words: learned vectors that are added to the input embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# 2^64 divided by the golden ratio, as a signed number: its products spread pairs over the rows
# (Knuth 1998, "The art of computer programming", vol. 3, section 6.4).
_MULTIPLIER = -7046029254386353131
HISTORY = 7
"""Tokens before a token that its notes depend on: words are told apart by their last eight."""

CONTINUES, IS_CONTINUED, STANDS_ALONE = 1, 2, 4
"""What a symbol is to words, as bits: a part of the word before it, of the word behind it, of
none."""


def is_sparse(module: nn.Module) -> bool:
    """Whether *module* is a table whose gradients are sparse."""
    return isinstance(module, nn.Embedding) and module.sparse


class Notes(nn.Module):
    """A table of rows that keys share by a hash.

    The idea of notes for rare strings (Wu et al. 2021, "Taking notes on the fly"), with rows that
    are learned and kept. Gradients are sparse: only the rows of a batch are read, written, and
    sent.

    Args:
        rows: of the table; row 0 is one more, for tokens without a note, and stays zero.
        dim: channels C.
        dropout: probability with which a token goes without its note, in training; others are not
            scaled, because most tokens of a new text have no note that was learned.
    """

    def __init__(self, rows: int, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        # Zeros: a model begins without notes, and draws no random numbers for them.
        self.table = nn.Embedding(1 + rows, dim, padding_idx=0, sparse=True, _weight=torch.zeros(1 + rows, dim))

    def forward(self, text: Tensor, document_positions: Tensor | None = None) -> Tensor:
        """The notes [B, T, C] of the tokens of *text* [B, HISTORY + T] behind the first
        ``HISTORY``, which are −1 where the segment begins.

        The first token of a document has none: of several in a row, those with position 0 of
        *document_positions* [B, T].
        """
        rows = self.rows_of(text)
        if document_positions is not None:
            rows = rows.where(document_positions > 0, 0)
        if self.training and self.dropout:
            rows = rows.masked_fill(torch.rand(rows.shape, device=rows.device) < self.dropout, 0)
        if rows.device.type == "cpu":
            return self.table(rows)
        # Row 0 has a gradient of zeros. The host would wait for the size of one without row 0.
        return F.embedding(rows, self.table.weight, sparse=True).masked_fill((rows == 0)[..., None], 0)

    def rows_of(self, text: Tensor) -> Tensor:
        """The rows [B, T] of the same tokens."""
        raise NotImplementedError

    def hashed(self, keys: Tensor, has_note: Tensor) -> Tensor:
        """The rows of 64-bit *keys*; 0 without a note."""
        rows = 1 + ((keys * _MULTIPLIER >> 32) & 0xFFFFFFFF) % (self.table.num_embeddings - 1)
        return rows.where(has_note, 0)


class NGramNotes(Notes):
    """A note for each pair of successive tokens; as hashed n-grams in Huang et al. 2025,
    "Over-tokenized transformer".

    Args:
        vocabulary: number of tokens.
        padding_idx: the padding symbol, which is in no pair; -1: there is none.
    """

    def __init__(self, rows: int, dim: int, vocabulary: int, padding_idx: int, dropout: float = 0.0) -> None:
        super().__init__(rows, dim, dropout)
        self.vocabulary, self.padding_idx = vocabulary, padding_idx

    def rows_of(self, text: Tensor) -> Tensor:
        first, second = text[:, HISTORY - 1 : -1], text[:, HISTORY:]
        is_pair = (first >= 0) & (second >= 0)
        if self.padding_idx >= 0:
            is_pair &= (first != self.padding_idx) & (second != self.padding_idx)
        return self.hashed(first * self.vocabulary + second, is_pair)


class WordNotes(Notes):
    """A note for the word so far, from its first token in the segment to this one; a word's first
    token has none.

    Attributes:
        parts: what each symbol is to words (``CONTINUES`` and others): uint8 [V]. Stored with the
            parameters.
    """

    parts: Tensor

    def __init__(self, rows: int, dim: int, vocabulary: int, dropout: float = 0.0) -> None:
        super().__init__(rows, dim, dropout)
        self.register_buffer("parts", torch.zeros(vocabulary, dtype=torch.uint8))

    def rows_of(self, text: Tensor) -> Tensor:
        parts = self.parts[text.clamp(min=0)].where(text >= 0, STANDS_ALONE)
        before, after = parts[:, :-1], parts[:, 1:]
        joined = (after & CONTINUES > 0) & (before & STANDS_ALONE == 0)
        joined |= (before & IS_CONTINUED > 0) & (after & STANDS_ALONE == 0)
        # Each token's key is a sum over itself and those before it in its word: *inside* says
        # whether the one *back* places before is one of them.
        key, inside, multiplier = text[:, HISTORY:], joined[:, HISTORY - 1 :], 1
        for back in range(1, HISTORY + 1):
            multiplier = multiplier * 6364136223846793005 % 2**62  # odd (Knuth 1997, vol. 2, section 3.3.4)
            key = key + torch.where(inside, (text[:, HISTORY - back : -back] + 1) * multiplier, 0)
            if back < HISTORY:
                inside = inside & joined[:, HISTORY - 1 - back : -back]
        return self.hashed(key, joined[:, HISTORY - 1 :])
