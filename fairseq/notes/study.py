"""The notes of a trained model: neighbours, norms and ages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.errors import UserError
from fairseq.models.base import BaseFairseqModel
from fairseq.notes.dictionary import NoteDictionary
from fairseq.notes.words import NOTES, NoteWords
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.tokenizer import readable_symbols

CHUNK = 1 << 14  # vectors compared at once


@dataclass(frozen=True)
class Neighbour:
    """A neighbouring word and its cosine similarity."""

    word: str
    cosine: float


@dataclass(frozen=True)
class Note:
    """Figures of one note.

    Attributes:
        word: the word.
        count: occurrences in the training text.
        taken: occurrences that the note averages; less than all in an epoch, because masked words
            are not counted.
        age: updates since it was last written; None: never written, still its random initial value.
        norm: its Euclidean norm.
    """

    word: str
    count: int
    taken: int
    age: int | None
    norm: float


class NoteStudy:
    """The notes of a model, compared with each other and with token embeddings.

    Notes share a large common component, the mean hidden state.
    Cosines are therefore computed after subtracting the mean of all
    written notes from notes, and the mean of all embeddings from embeddings.

    Args:
        model: with notes.
        words: of its notes.
        dictionary: of its tokens.

    Raises:
        UserError: the model has no notes, or another number of notes than there are words.
    """

    def __init__(self, model: BaseFairseqModel, words: NoteWords, dictionary: Dictionary, source: str) -> None:
        notes = getattr(model, "notes", None)
        if not isinstance(notes, NoteDictionary):
            raise UserError(f"{source}: has no notes; give a checkpoint of `arch` tnf_… or `notes`")
        if notes.table.size(0) != len(words):
            raise UserError(f"{source}: has {notes.table.size(0)} notes, but {NOTES} has {len(words)} words")
        self.words = words
        self.symbols = readable_symbols(dictionary)
        self.updates = int(notes.updates)
        self.written = notes.written.numpy().astype(np.int64)
        self.taken = notes.taken.numpy()
        self.table = notes.table
        self.norms = notes.table.norm(dim=1).numpy()
        self._project: Callable[[Tensor], Tensor] = getattr(model, "note_projection", None) or (lambda x: x)
        self._embed = _embeddings_of(model)
        self._centred = _centred(self.table, torch.from_numpy(self.written > 0))

    def facts(self, number: int) -> Note:
        """The figures of note *number*."""
        age = self.updates - int(self.written[number]) if self.written[number] else None
        occurrences, norm = int(self.taken[number]), float(self.norms[number])
        return Note(self.words.words[number], self.words.counts[number], occurrences, age, norm)

    def numbers_of(self, names: Sequence[str]) -> list[int]:
        """The numbers of the words *names*.

        Raises:
            UserError: a word has no note.
        """
        numbers = {word: number for number, word in enumerate(self.words.words)}
        for name in names:
            if name not in numbers:
                raise UserError(f"`words` {name}: has no note; choose words from {NOTES} in the data folder")
        return [numbers[name] for name in names]

    def most_taken(self, count: int) -> list[int]:
        """The numbers of up to *count* written notes,
        in falling order of the occurrences they average."""
        order = np.argsort(-self.taken, kind="stable")
        return order[self.written[order] > 0][:count].tolist()

    @torch.no_grad()
    def nearest_notes(self, numbers: Sequence[int], count: int) -> list[list[Neighbour]]:
        """For each of the notes *numbers*, the *count* nearest other written notes."""
        written = torch.from_numpy(np.flatnonzero(self.written))
        # One more than asked for: a note is nearest to itself.
        neighbours = nearest(
            self._centred[list(numbers)], lambda rows: self._centred[written[rows]], len(written), count + 1
        )
        return [
            [
                Neighbour(self.words.words[int(written[index])], cosine)
                for index, cosine in row
                if int(written[index]) != number
            ][:count]
            for number, row in zip(numbers, neighbours, strict=True)
        ]

    @torch.no_grad()
    def nearest_tokens(self, numbers: Sequence[int], count: int) -> list[list[Neighbour]]:
        """For each of the notes *numbers*, the *count* tokens with the nearest embeddings."""
        queries = self._project(self._centred[list(numbers)])
        size = len(self.symbols)
        # In pieces: all embeddings at once, of adaptive inputs, take more memory than the model.
        mean = sum((self._embed(rows).sum(0) for rows in torch.arange(size).split(CHUNK)), torch.zeros(())) / size
        neighbours = nearest(queries, lambda rows: self._embed(rows) - mean, size, count)
        return [[Neighbour(self.symbols[index], cosine) for index, cosine in row] for row in neighbours]


def nearest(queries: Tensor, rows: Callable[[Tensor], Tensor], size: int, count: int) -> list[list[tuple[int, float]]]:
    """Indices and cosines of the *count* vectors
    nearest to each of *queries* [Q, C], nearest first.

    Args:
        queries: vectors.
        rows: function from indices int64 [n] to vectors
            [n, C]; called with chunks of 0 … *size* − 1.
        size: the number of vectors.
        count: number of neighbours; fewer if *size* is smaller.
    """
    queries = F.normalize(queries.float(), dim=1)
    best = torch.empty(len(queries), 0)
    numbers = torch.empty(len(queries), 0, dtype=torch.int64)
    for piece in torch.arange(size).split(CHUNK):
        cosines = queries @ F.normalize(rows(piece).float(), dim=1).T  # (Q, n)
        # A running best: all cosines, [Q, vocabulary], may not fit into memory.
        best = torch.cat([best, cosines], 1)
        numbers = torch.cat([numbers, piece.expand(len(queries), -1)], 1)
        best, order = best.topk(min(count, best.size(1)), dim=1)
        numbers = numbers.gather(1, order)
    return [list(zip(*pair, strict=True)) for pair in zip(numbers.tolist(), best.tolist(), strict=True)]


def _centred(table: Tensor, written: Tensor) -> Tensor:
    """*table* minus the mean of its *written* rows; unwritten rows are unchanged."""
    if not bool(written.any()):
        return table
    # Notes that were never written are random, and no part of the common component.
    return torch.where(written[:, None], table - table[written].mean(0), table)


def _embeddings_of(model: BaseFairseqModel) -> Callable[[Tensor], Tensor]:
    """The function from ids [n] to embeddings [n, E] of *model*."""
    encoder: Any = getattr(model, "encoder", None)
    part: Any = encoder.sentence_encoder if encoder is not None else model.decoder
    return lambda ids: part.embed_tokens(ids[None])[0]
