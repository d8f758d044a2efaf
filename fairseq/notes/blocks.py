"""Blocks of a corpus with the rare words that may read their notes."""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fairseq.data.dataset import Sample
from fairseq.data.masking import MaskedBlocks
from fairseq.data.position import EpochLayout
from fairseq.data.token_blocks import TokenBlocks
from fairseq.notes.spans import NoteSpans

B = TypeVar("B", MaskedBlocks, TokenBlocks)
N = TypeVar("N", bound="NotedExamples[Any]")

SUBSETS = ("rare", "near", "far")
DISTANCES = {"note_1": 1, "note_2_3": 3, "note_4_8": 8, "note_far": np.iinfo(np.int64).max}
"""Subsets of targets by the words between them and the nearest note that is read, and the farthest
of each."""
_NONE = 1 << 40  # farther than any word


def by_distance(words: np.ndarray, notes: np.ndarray, both: bool) -> dict[str, torch.Tensor]:
    """The :data:`DISTANCES` of targets; the word that reads a note is in none of them.

    Args:
        words: number of the word of each target in its row, int64 [B, T].
        notes: at each token that reads a note, the number
            of the note's word; −1 elsewhere, int64 [B, T].
        both: whether a target sees notes on both sides, or those at its column and before it.
    """
    distance = words - np.maximum.accumulate(np.where(notes < 0, -_NONE, notes), axis=1)
    if both:
        after = np.minimum.accumulate(np.where(notes < 0, _NONE, notes)[:, ::-1], axis=1)[:, ::-1]
        distance = np.minimum(distance, after - words)
    low, subsets = 0, {}
    for name, high in DISTANCES.items():
        subsets[name] = torch.from_numpy((distance > low) & (distance <= high))
        low = high
    return subsets


def subsets_of(rare: np.ndarray) -> dict[str, torch.Tensor]:
    """The :data:`SUBSETS` of targets: *rare* ones, bool
    [B, T], all of rows with some, and all of other rows."""
    mask = torch.from_numpy(rare)
    near = mask.any(1, keepdim=True)  # (B, 1)
    return {"rare": mask, "near": near, "far": ~near}


class NotedExamples(Generic[B]):
    """Examples of a corpus with the positions of rare words.

    Args:
        blocks: the examples.
        spans: the rare words of their corpus.
        read: whether the model reads notes; if not, batches mark the :data:`SUBSETS` only.
        written: words whose notes have been written, bool [N]; batches mark the :data:`DISTANCES`
            to them, too, and have ``hidden``, their input with *mask* for each of their tokens.
        mask: id of a symbol.
    """

    def __init__(
        self, blocks: B, spans: NoteSpans, *, read: bool = True, written: np.ndarray | None = None, mask: int = -1
    ) -> None:
        self.blocks: B = blocks
        self.spans = spans
        self.read = read
        self.written = written
        self.mask = mask

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each example: int32 [n]."""
        return self.blocks.sizes

    def __len__(self) -> int:
        return len(self.blocks)

    def checksums(self) -> dict[str, int]:
        """What tells the files of the corpus and of its notes from others, by their names."""
        notes = int.from_bytes(self.spans.fingerprint[:4], "little")
        return self.blocks.checksums() | {"notes.txt": notes}

    def at_epoch(self: N, epoch: int) -> N:
        """The examples as in *epoch* (from 1)."""
        return self._with(self.blocks.at_epoch(epoch))

    def continuing(self: N, saved: EpochLayout) -> N:
        """The examples in the order of a run that stored *saved*."""
        return self._with(self.blocks.continuing(saved))

    def select(self: N, keep: np.ndarray) -> N:
        """The examples for which *keep*, bool [n], is true, renumbered."""
        return self._with(self.blocks.select(keep))

    def _with(self: N, blocks: B) -> N:
        view = copy.copy(self)
        view.blocks = blocks
        return view

    def _marked(self, sample: Sample, rare: np.ndarray, spans: np.ndarray, positions: np.ndarray) -> Sample:
        """*sample* with *rare* targets, bool [B, T], and for a model that reads notes the *spans*
        that do, [S, 4].

        Column t of the input is the corpus's token at *positions*, int64 [B, T or more].
        """
        net_input, subsets = sample["net_input"], subsets_of(rare)
        if self.read:
            # On the host: computed from a tensor on a GPU, it would synchronise.
            longest = int((spans[:, 2] - spans[:, 1]).max(initial=1))
            net_input = {**net_input, "spans": torch.from_numpy(spans), "longest_span": longest}
        if self.written is not None:
            words = self.spans.begins_at(positions).cumsum(1)
            spans = spans[self.written[spans[:, 3]]]
            subsets |= self._distances(words, spans)
            sample = {**sample, "hidden": self._hidden(net_input["src_tokens"], spans)}
        return {**sample, "subsets": subsets, "net_input": net_input}

    def _hidden(self, tokens: torch.Tensor, spans: np.ndarray) -> torch.Tensor:
        """*tokens* [B, T] with the mask for each token of *spans* [S, 4]."""
        hidden = tokens.clone()
        for row, first, end, _ in spans:
            hidden[row, first:end] = self.mask
        return hidden

    def _distances(self, words: np.ndarray, spans: np.ndarray) -> dict[str, torch.Tensor]:
        """The :data:`DISTANCES` of targets to *spans* [S, 4];
        *words* numbers the words at a sample's positions."""
        raise NotImplementedError


class NotedBlocks(NotedExamples[MaskedBlocks]):
    """Masked blocks, rows of a begin symbol and a block, with the positions of rare words."""

    def batch(self, indices: np.ndarray) -> Sample:
        """Rows *indices* [B] padded on the right.

        A word with any token chosen for prediction has no span: its note would reveal the target,
        and would be taken from a text with the word masked.

        Returns:
            The sample of :class:`MaskedBlocks`; ``subsets``, see :func:`subsets_of`;
            ``rare_words`` int64 [R, 4], all whole rare words of the rows;
            and for the model ``spans`` int64 [S, 4], those without a chosen token,
            and ``longest_span``, their maximal number of tokens.
        """
        sample = self.blocks.batch(indices)
        plain = self.blocks.blocks
        words = self.spans.spans(plain.starts[indices], plain.sizes[indices])
        words[:, 1:3] += 1  # after the begin symbol
        spans = words[~covered(words, sample["target"].numpy() != plain.pad)]
        column = np.arange(sample["target"].size(1))
        positions = plain.starts[indices][:, None] + column - 1
        rare = self.spans.rare_at(positions)
        # Without the begin symbol and the padding, whose columns hold positions of other text.
        rare &= (column > 0) & (column <= plain.sizes[indices][:, None])
        return {**self._marked(sample, rare, spans, positions), "rare_words": torch.from_numpy(words)}

    def _distances(self, words: np.ndarray, spans: np.ndarray) -> dict[str, torch.Tensor]:
        notes = np.full_like(words, -1)
        row, first, _, _ = spans.T
        notes[row, first] = words[row, first]
        return by_distance(words, notes, both=True)


def covered(spans: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """Mask of the *spans* [S, 4] with a *marked* token: marked bool [B, T] → bool [S]."""
    # Prefix sums: the marked tokens of any span are one difference.
    before = np.zeros((marked.shape[0], marked.shape[1] + 1), dtype=np.int64)
    np.cumsum(marked, axis=1, out=before[:, 1:])
    row, first, end, _ = spans.T
    return before[row, end] > before[row, first]


class NotedStream(NotedExamples[TokenBlocks]):
    """Blocks of a corpus for a causal model, with the positions of rare words in its input.

    Args:
        blocks, spans, read, written, mask: as of :class:`NotedExamples`.
        joins: bool [V], symbols that the next token may continue (``…@@``, the unknown symbol). A
            word that ends in one has no span: only the next token shows that it ends.
        delay: tokens after the last one of a word at which its note is read.
    """

    def __init__(
        self, blocks: TokenBlocks, spans: NoteSpans, joins: np.ndarray, *, delay: int = 0, **settings: Any
    ) -> None:
        super().__init__(blocks, spans, **settings)
        self.joins = joins
        self.delay = delay

    def batch(self, indices: np.ndarray) -> Sample:
        """Blocks *indices* [B] as rows padded on the right.

        Returns:
            The sample of :class:`TokenBlocks`; ``subsets``, see :func:`subsets_of`;
            and for the model ``spans`` int64 [S, 4], the rare words
            that are complete in its input, and ``longest_span``.
        """
        sample = self.blocks.batch(indices)
        tokens = sample["net_input"]["src_tokens"].numpy()
        positions = self.blocks.positions(indices)  # (B, T + 1); targets are one column after the source
        spans = self.spans.spans_at(positions, self.blocks.sizes[indices])
        spans = spans[~self.joins[tokens[spans[:, 0], spans[:, 2] - 1]]]
        return self._marked(sample, self.spans.rare_at(positions[:, 1:]), spans, positions)

    def _distances(self, words: np.ndarray, spans: np.ndarray) -> dict[str, torch.Tensor]:
        notes = np.full_like(words, -1)
        row, first, end, _ = spans.T
        # With a delay of 1 this is the column behind the last target's, which is there for it.
        notes[row, end - 1 + self.delay] = words[row, first]
        return by_distance(words[:, 1:], notes[:, :-1], both=False)
