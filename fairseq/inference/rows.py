"""Rows of tokens that a model reads through its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Rows:
    """Rows of tokens that a model reads through its cache:
    segment after segment, or window after window.

    A model with memory reads each token once, at a constant cost. A model without memory has a
    window of positions; when it is full, its second half is read again as the start of the next
    window. Every window begins with the reader's ``begin``, as every row does in training.

    Args:
        reader: a :class:`~fairseq.inference.engine.Reader`, or what has its ``model``, ``device``,
            ``begin``, ``new_cache`` and ``read``.
        rows: number of rows B.
        longest: most tokens that will be read of a row; None: no limit.
    """

    def __init__(self, reader: Any, rows: int, longest: int | None = None) -> None:
        self.reader, self.count = reader, rows
        self.cache = reader.new_cache(rows, longest)
        self.window: Tensor | None = None
        if not reader.model.memory_length:
            self.window = torch.zeros(rows, self.cache.segment_length, dtype=torch.long, device=reader.device)
        # A window of one position would have no room for text beside it.
        self.begin = reader.begin if self.cache.segment_length > 1 else None

    def read(self, tokens: Tensor) -> Tensor:
        """Hidden states of *tokens* [B, T], which continue the rows, after a first ``begin``:
        [B, T, C]."""
        parts: list[Tensor] = []
        if self.cache.length == 0:
            tokens = self._begun(tokens)
        while tokens.size(1):
            again = 0
            if self.cache.room == 0:
                new, tokens = tokens.size(1), self._make_room(tokens)
                again = tokens.size(1) - new
            piece, tokens = tokens[:, : self.cache.room], tokens[:, self.cache.room :]
            if self.window is not None:
                start = self.cache.in_segment
                # The tokens of the window are needed once more when it is full.
                self.window[:, start : start + piece.size(1)] = piece
            # Without what was read again: its states were returned before.
            parts.append(self.reader.read(piece, self.cache)[:, again:])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def select_rows(self, parents: Sequence[int]) -> None:
        """Make row ``parents[i]`` the new row i; rows may be dropped and repeated."""
        if [*parents] == [*range(self.count)]:
            return
        self.count = len(parents)
        self.cache.select_rows(parents)
        if self.window is not None:
            self.window = self.window[torch.tensor(parents, device=self.window.device)]

    def _make_room(self, tokens: Tensor) -> Tensor:
        """Begin a new segment or window; return *tokens*
        [B, T] preceded by the tokens to read again."""
        if self.window is None:
            self.cache.next_segment()
            return tokens
        self.cache.clear()
        length = self.window.size(1)
        # A half: with less, tokens after it would have little context; with more, most would be
        # read several times.
        again = (length - (self.begin is not None)) // 2
        return self._begun(torch.cat([self.window[:, length - again :], tokens], dim=1))

    def _begun(self, tokens: Tensor) -> Tensor:
        """*tokens* [B, T] after the symbol that rows begin with."""
        return tokens if self.begin is None else F.pad(tokens, (1, 0), value=self.begin)
