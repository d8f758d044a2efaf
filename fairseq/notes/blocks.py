"""Blocks of a corpus with the rare words that may read their notes."""

from __future__ import annotations

import copy

import numpy as np
import torch

from fairseq.data.dataset import Sample
from fairseq.data.masking import MaskedBlocks
from fairseq.data.token_blocks import TokenBlocks
from fairseq.notes.spans import NoteSpans

SUBSETS = ("rare", "near", "far")


def subsets_of(rare: np.ndarray) -> dict[str, torch.Tensor]:
    """The :data:`SUBSETS` of targets: *rare* ones, bool [B, T], all of rows with some, and all of other rows."""
    mask = torch.from_numpy(rare)
    near = mask.any(1, keepdim=True)  # (B, 1)
    return {"rare": mask, "near": near, "far": ~near}


class NotedBlocks:
    """Masked blocks with the positions of rare words.

    Args:
        blocks: rows of a begin symbol and a block.
        spans: the rare words of the blocks' corpus.
    """

    def __init__(self, blocks: MaskedBlocks, spans: NoteSpans) -> None:
        self.blocks = blocks
        self.spans = spans

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each row: int32 [n]."""
        return self.blocks.sizes

    def __len__(self) -> int:
        return len(self.blocks)

    def checksums(self) -> dict[str, int]:
        """CRC-32 of each file of the corpus and of its notes, by its name."""
        return self.blocks.checksums() | self.spans.checksums()

    def at_epoch(self, epoch: int) -> NotedBlocks:
        """The rows with the masking of *epoch* (from 1)."""
        return self._with(self.blocks.at_epoch(epoch))

    def select(self, keep: np.ndarray) -> NotedBlocks:
        """The rows for which *keep*, bool [n], is true, renumbered."""
        return self._with(self.blocks.select(keep))

    def batch(self, indices: np.ndarray) -> Sample:
        """Rows *indices* [B] padded on the right.

        A word with any token chosen for prediction has no span: its note would reveal the target, and would be taken
        from a text with the word masked.

        Returns:
            The sample of :class:`MaskedBlocks`; ``subsets``, see :func:`subsets_of`; ``rare_words`` int64
            [R, 4], all whole rare words of the rows; and for the model ``spans`` int64 [S, 4], those without a chosen
            token, and ``longest_span``, their maximal number of tokens.
        """
        sample = self.blocks.batch(indices)
        plain = self.blocks.blocks
        words = self.spans.spans(plain.starts[indices], plain.sizes[indices])
        words[:, 1:3] += 1  # after the begin symbol
        spans = words[~covered(words, sample["target"].numpy() != plain.pad)]
        longest = int((spans[:, 2] - spans[:, 1]).max(initial=1))
        column = np.arange(sample["target"].size(1))
        rare = self.spans.rare_at(plain.starts[indices][:, None] + column - 1)
        rare &= (column > 0) & (column <= plain.sizes[indices][:, None])
        return {
            **sample,
            "subsets": subsets_of(rare),
            "rare_words": torch.from_numpy(words),
            "net_input": {**sample["net_input"], "spans": torch.from_numpy(spans), "longest_span": longest},
        }

    def _with(self, blocks: MaskedBlocks) -> NotedBlocks:
        view = copy.copy(self)
        view.blocks = blocks
        return view


def covered(spans: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """Mask of the *spans* [S, 4] with a *marked* token: marked bool [B, T] → bool [S]."""
    before = np.zeros((marked.shape[0], marked.shape[1] + 1), dtype=np.int64)
    np.cumsum(marked, axis=1, out=before[:, 1:])
    row, first, end, _ = spans.T
    return before[row, end] > before[row, first]


class NotedStream:
    """Blocks of a corpus for a causal model, with the positions of rare words in its input.

    Args:
        blocks: the blocks.
        spans: the rare words of the blocks' corpus.
        joins: bool [V], symbols that the next token may continue (``…@@``, the unknown symbol). A word that ends in
            one has no span: only the next token shows that it ends.
    """

    def __init__(self, blocks: TokenBlocks, spans: NoteSpans, joins: np.ndarray) -> None:
        self.blocks = blocks
        self.spans = spans
        self.joins = joins

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each block: int32 [n]."""
        return self.blocks.sizes

    def __len__(self) -> int:
        return len(self.blocks)

    def checksums(self) -> dict[str, int]:
        """CRC-32 of each file of the corpus and of its notes, by its name."""
        return self.blocks.checksums() | self.spans.checksums()

    def at_epoch(self, epoch: int) -> NotedStream:
        """The blocks of *epoch* (from 1)."""
        return self._with(self.blocks.at_epoch(epoch))

    def select(self, keep: np.ndarray) -> NotedStream:
        """The blocks for which *keep*, bool [n], is true, renumbered."""
        return self._with(self.blocks.select(keep))

    def batch(self, indices: np.ndarray) -> Sample:
        """Blocks *indices* [B] as rows padded on the right.

        Returns:
            The sample of :class:`TokenBlocks`; ``subsets``, see :func:`subsets_of`; and for
            the model ``spans`` int64 [S, 4], the rare words that are complete in its input, and ``longest_span``.
        """
        sample = self.blocks.batch(indices)
        tokens = sample["net_input"]["src_tokens"].numpy()
        places = self.blocks.places(indices)  # (B, T + 1); targets are one column after the source
        spans = self.spans.spans_at(places, self.blocks.sizes[indices])
        spans = spans[~self.joins[tokens[spans[:, 0], spans[:, 2] - 1]]]
        longest = int((spans[:, 2] - spans[:, 1]).max(initial=1))
        return {
            **sample,
            "subsets": subsets_of(self.spans.rare_at(places[:, 1:])),
            "net_input": {**sample["net_input"], "spans": torch.from_numpy(spans), "longest_span": longest},
        }

    def _with(self, blocks: TokenBlocks) -> NotedStream:
        view = copy.copy(self)
        view.blocks = blocks
        return view
