"""Next-token probabilities of one model or several,
for a batch of texts read through the key-value cache.

All rows of a batch are at one position: the common length of the prompts is read at once, then
longer prompts read their own tokens while the others choose. There is no padding, so a text does
not depend on its batch; its randomness is (seed, prompt, sample).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq.errors import UserError
from fairseq.inference.engine import Reader
from fairseq.inference.rows import Rows
from fairseq.models.base import BaseFairseqModel

Model = BaseFairseqModel | Reader
"""A model, or a reader of it that several predictors share."""


def reach(model: Model) -> int:
    """The longest distance, in tokens, that the model attends over, the current token included."""
    used = reader_of(model).model
    # A cache knows how long a segment is; one row and one token make it small.
    return used.new_cache(1, 1).segment_length + used.memory_length


def reader_of(model: Model) -> Reader:
    """A reader of *model*; a reader is returned unchanged."""
    return model if isinstance(model, Reader) else Reader(model)


class Predictor:
    """Log-probabilities of the next token of each of several texts.

    All texts have the same number of tokens, so they share one cache without padding. Probabilities
    of several models are averaged.

    Args:
        models: in evaluation mode, on one device, over one dictionary.
        rows: number of texts.
        forbidden: tokens that get probability zero.
        longest: most tokens that will be read of a text (default:
            no limit); limits the memory's allocation.
    """

    def __init__(
        self, models: Sequence[Model], rows: int, forbidden: Sequence[int] = (), longest: int | None = None
    ) -> None:
        self.rows = [Rows(reader_of(model), rows, longest) for model in models]
        self.texts = rows
        self.device = self.rows[0].reader.device
        self.forbidden = list(forbidden)
        self._checked = False

    def read(self, tokens: Sequence[Sequence[int]], first: int = 0) -> Tensor:
        """Read *tokens* [rows, T]; return log-probabilities
        of the next token for the rows from *first* on.

        T may be 0 at the start of texts for models that begin with ``<s>``.

        Returns:
            [rows − first, V], float32.

        Raises:
            UserError: a model's probabilities are NaN.
        """
        of_models = [rows.reader.log_probs(hidden) for rows, hidden in self._hidden(tokens, first)]
        lprobs = of_models[0]
        if len(of_models) > 1:
            # The mean of probabilities, as in fairseq's ensembles, not of logarithms.
            lprobs = torch.stack(of_models).logsumexp(0) - math.log(len(of_models))
        self._check(lprobs)
        lprobs[:, self.forbidden] = -torch.inf
        return lprobs

    def best(self, tokens: Sequence[Sequence[int]], count: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Read *tokens* as :meth:`read` does; return
        the *count* most probable next tokens in falling order.

        Returns:
            Scores, float32: log-probabilities up to a constant for each row; and tokens. Both
                [rows − first, count],
            with fewer columns if the dictionary is smaller.

        Raises:
            UserError: a model's probabilities are NaN.
        """
        if len(self.rows) > 1:
            lprobs = self.read(tokens, first)
            return lprobs.topk(min(count, lprobs.size(-1)))
        ((rows, hidden),) = self._hidden(tokens, first)
        scores, words = rows.reader.best(hidden, count, self.forbidden)
        self._check(scores)
        return scores, words

    def keep_rows(self, rows: int) -> None:
        """Drop all but the first *rows* texts."""
        self.texts = rows
        for each in self.rows:
            each.keep_rows(rows)

    def select_rows(self, index: Sequence[int]) -> None:
        """Make text *index[i]* the new text i; texts may be repeated."""
        # With one beam, and mostly with several, each text continues itself: nothing is copied.
        if list(index) == list(range(self.texts)):
            return
        self.texts = len(index)
        chosen = torch.tensor(index, device=self.device)
        for each in self.rows:
            each.select_rows(chosen)

    def _hidden(self, tokens: Sequence[Sequence[int]], first: int) -> list[tuple[Rows, Tensor]]:
        """Last hidden states [rows − first, C] of each model."""
        source = torch.tensor(tokens, dtype=torch.long, device=self.device)
        return [(rows, rows.read(source)[first:, -1]) for rows in self.rows]

    def _check(self, scores: Tensor) -> None:
        # Only once: reading a value synchronises with the GPU,
        # and NaN weights give NaN at the first token.
        if not self._checked and bool(scores.isnan().any()):
            raise UserError(
                "the model's probabilities are NaN: its training diverged, or it exceeds the range of float16; "
                "use bfloat16 or float32"
            )
        self._checked = True
