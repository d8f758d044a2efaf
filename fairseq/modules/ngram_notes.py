"""Notes of pairs of tokens: learned vectors that are added to the input embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# 2^64 divided by the golden ratio, as a signed number: its products spread pairs over the rows
# (Knuth 1998, "The art of computer programming", vol. 3, section 6.4).
_MULTIPLIER = -7046029254386353131


def is_sparse(module: nn.Module) -> bool:
    """Whether *module* is a table whose gradients are sparse."""
    return isinstance(module, nn.Embedding) and module.sparse


class NGramNotes(nn.Module):
    """A note for each pair of successive tokens, a row of a table that pairs share by a hash.

    The idea of notes for rare strings (Wu et al. 2021, "Taking notes on the fly"), with rows that
    are learned and kept; as hashed n-grams in Huang et al. 2025, "Over-tokenized transformer".
    Gradients are sparse: only rows of the pairs in a batch are read, written, and sent.

    Args:
        rows: of the table; row 0 is more, for tokens without one before, and stays zero.
        dim: channels C.
        vocabulary: number of tokens.
        padding_idx: the padding symbol, which is in no pair; -1: there is none.
    """

    def __init__(self, rows: int, dim: int, vocabulary: int, padding_idx: int) -> None:
        super().__init__()
        self.vocabulary, self.padding_idx = vocabulary, padding_idx
        # Zeros: a model begins without notes, and draws no random numbers for them.
        self.table = nn.Embedding(1 + rows, dim, padding_idx=0, sparse=True, _weight=torch.zeros(1 + rows, dim))

    def forward(self, tokens: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the notes of *tokens* [B, T], each with the token before it: [B, T, C]; and what
        the next call needs as *before*.

        *before* are the tokens that precede the first ones, [B, 1]; None: *tokens* begin a segment.
        """
        if before is None:
            before = tokens.new_full((len(tokens), 1), -1)
        first = torch.cat([before, tokens[:, :-1]], dim=1)
        rows = self.rows_of(first, tokens)
        if tokens.device.type == "cpu":
            notes = self.table(rows)
        else:
            # Row 0 has a gradient of zeros. The host would wait for the size of one without row 0.
            notes = F.embedding(rows, self.table.weight, sparse=True).masked_fill((rows == 0)[..., None], 0)
        return notes, tokens[:, -1:]

    def rows_of(self, first: Tensor, second: Tensor) -> Tensor:
        """The rows of pairs of tokens; 0 where one of them is none."""
        spread = (first * self.vocabulary + second) * _MULTIPLIER
        rows = 1 + ((spread >> 32) & 0xFFFFFFFF) % (self.table.num_embeddings - 1)
        missing = (first < 0) | (second < 0)
        if self.padding_idx >= 0:
            missing |= (first == self.padding_idx) | (second == self.padding_idx)
        return rows.masked_fill(missing, 0)
