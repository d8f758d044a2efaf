"""What a model, or several, expect after the tokens read so far: rows of texts, through the key-value cache."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fairseq.errors import UserError
from fairseq.models import BaseFairseqModel

Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes the context of a forward pass, which decides its precision."""


def can_generate(model: BaseFairseqModel) -> bool:
    """Whether *model* has a key-value cache, and an output layer to read probabilities from."""
    return hasattr(model, "new_cache") and model.output_layer is not None


def reach(model: Any) -> int:
    """How many tokens back the model can look at most, the one it reads counted."""
    return int(model.new_cache(1, 1).segment_length + model.memory_length)


class Predictor:
    """Log-probabilities of the next token of each of several texts.

    All texts stand at the same place, counted from their start, so that they share one cache without padding. Of
    several models, probabilities are averaged.

    Args:
        models: in evaluation mode, on one device, over one dictionary.
        rows: how many texts.
        forbidden: tokens that have no probability.
        autocast: makes the context of a forward pass (default: the parameters' own precision).
        longest: most tokens that will be read of a text (default: no limit); there is no room for more memory.
    """

    def __init__(
        self,
        models: Sequence[BaseFairseqModel],
        rows: int,
        forbidden: Sequence[int] = (),
        autocast: Autocast = contextlib.nullcontext,
        longest: int | None = None,
    ) -> None:
        self.autocast = autocast
        self.device = next(models[0].parameters()).device
        self.forbidden = torch.tensor(list(forbidden), dtype=torch.long, device=self.device)
        with autocast():
            self.readers = [_Reader(model, rows, self.device, longest) for model in models]
        self._checked = False

    def read(self, tokens: Sequence[Sequence[int]], first: int = 0) -> Tensor:
        """Read *tokens* [rows, T]; the log-probabilities of what follows in the rows from *first* on.

        Returns:
            [rows − first, V], float32.

        Raises:
            UserError: a model's probabilities are not numbers.
        """
        source = torch.tensor(tokens, dtype=torch.long, device=self.device)
        with self.autocast():
            found = [reader.lprobs(source, first) for reader in self.readers]
        lprobs = found[0]
        if len(found) > 1:
            lprobs = torch.stack(found).logsumexp(0) - math.log(len(found))
        if not self._checked and bool(lprobs.isnan().any()):
            raise UserError(
                "the model's probabilities are not numbers: its training diverged, or float16 is too narrow for it "
                "and it needs bfloat16"
            )
        self._checked = True
        lprobs[:, self.forbidden] = -torch.inf
        return lprobs

    def keep_rows(self, rows: int) -> None:
        """Leave out all but the first *rows* texts."""
        for reader in self.readers:
            reader.keep_rows(rows)

    def select_rows(self, index: Tensor) -> None:
        """Make text *index[i]* the new text i: [new rows], on any device."""
        for reader in self.readers:
            reader.select_rows(index.to(self.device))


class _Reader:
    """Feeds rows of tokens to a model through its cache: segment after segment, or window after window.

    A model with memory reads each token once, at a constant cost. One without has room for a window of positions;
    when it is full, the window's last half is read again as the start of the next.
    """

    def __init__(self, model: Any, rows: int, device: torch.device, longest: int | None) -> None:
        self.model = model
        self.cache = model.new_cache(rows, longest)
        self.window: Tensor | None = None
        if not model.memory_length:
            self.window = torch.zeros(rows, self.cache.segment_length, dtype=torch.long, device=device)

    def lprobs(self, tokens: Tensor, first: int) -> Tensor:
        """Read *tokens* [B, T]; log-probabilities of the next token of the rows from *first* on, [B − first, V]."""
        hidden: Tensor | None = None
        while tokens.size(1):
            if self.cache.room == 0:
                tokens = self._make_room(tokens)
            piece, tokens = tokens[:, : self.cache.room], tokens[:, self.cache.room :]
            if self.window is not None:
                start = self.cache.in_segment
                self.window[:, start : start + piece.size(1)] = piece
            hidden = self.model(piece, cache=self.cache)[0][first:, -1]  # (B - first, C)
        assert hidden is not None
        return self.model.output_layer.log_probs(hidden)

    def keep_rows(self, rows: int) -> None:
        self.cache.keep_rows(rows)
        if self.window is not None:
            self.window = self.window[:rows]

    def select_rows(self, index: Tensor) -> None:
        self.cache.select_rows(index)
        if self.window is not None:
            self.window = self.window[index]

    def _make_room(self, tokens: Tensor) -> Tensor:
        """Begin a new segment or window; returns *tokens* [B, T] after those that must be read again."""
        if self.window is None:
            self.cache.next_segment()
            return tokens
        self.cache.clear()
        length = self.window.size(1)
        return torch.cat([self.window[:, length - length // 2 :], tokens], dim=1)
