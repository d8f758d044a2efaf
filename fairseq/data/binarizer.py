"""Text to numbers, in several processes, a part of the file at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fairseq.data.indexed_dataset import IndexedWriter, token_dtype
from fairseq.errors import UserError
from fairseq.system.workers import Workers
from fairseq.text.counting import LINE_END, over, text_blocks
from fairseq.text.dictionary import NONE, Dictionary
from fairseq.text.raw_text import no_words


@dataclass
class Summary:
    """Counts of a preprocessed text: lines, tokens (``</s>`` included), words that were not in the dictionary."""

    sentences: int = 0
    tokens: int = 0
    replaced: int = 0


class Marker(Protocol):
    """Finds marks of tokens in a worker process; picklable."""

    def mark(self, blocks: Iterable[str]) -> tuple[np.ndarray, ...]:
        """Return the marks of the tokens of the text in *blocks*, with the ``</s>`` of each line."""


class Annotation(Protocol):
    """What is written beside a corpus, token by token."""

    @property
    def marker(self) -> Marker:
        """Finds the marks."""

    def writer(self, prefix: str | Path) -> AbstractContextManager[Any]:
        """Open the files beside the corpus *prefix*; the value's ``add(*marks)`` appends what the marker found."""


class Binarizer:
    """Writes texts as corpora of a dictionary's ids; a context manager that keeps its processes from text to text.

    A line ends at ``\\n``, ``\\r`` or ``\\r\\n``; its words are what Unicode white space separates; ``</s>`` is added.

    Args:
        dictionary: gives the ids.
        workers: processes.
        beside: what is written beside each corpus; None: nothing is.
        replaced_before: whether unknown symbols in the text count as replaced, as those of a tokenizer do.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        workers: int = 1,
        beside: Annotation | None = None,
        replaced_before: bool = False,
    ) -> None:
        self._dtype = token_dtype(len(dictionary))
        self._beside = beside
        encoder = _Encoder(
            {**dictionary.indices, LINE_END: dictionary.eos_index},
            dictionary.unk_word,
            dictionary.unk_index,
            self._dtype,
            dictionary.lack(),
            beside.marker if beside is not None else None,
            replaced_before,
        )
        self._pool = Workers(encoder, workers)

    def __enter__(self) -> Binarizer:
        self._pool.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.__exit__(*error)

    def binarize(self, path: str, prefix: str | Path) -> Summary:
        """Write the text *path* to *prefix* ``.bin`` and ``.idx``; the same bytes for any number of processes.

        Raises:
            UserError: the text is missing, empty or not UTF-8, or a process died; no file is written.
        """
        summary = Summary()
        with contextlib.ExitStack() as files:
            writer = files.enter_context(IndexedWriter(prefix, self._dtype))
            marks = files.enter_context(self._beside.writer(prefix)) if self._beside is not None else None
            for encoded in over(self._pool, path, "writing"):
                writer.add(encoded.tokens, encoded.sizes)
                if marks is not None and encoded.marks is not None:
                    marks.add(*encoded.marks)
                summary.sentences += len(encoded.sizes)
                summary.tokens += len(encoded.tokens)
                summary.replaced += encoded.replaced
            if summary.tokens == summary.sentences:
                raise no_words(path)
        return summary


@dataclass(frozen=True)
class _Encoded:
    """A part of a text: tokens [N], sizes of its lines [lines], words replaced by the unknown symbol, marks."""

    tokens: np.ndarray
    sizes: np.ndarray
    replaced: int
    marks: tuple[np.ndarray, ...] | None  # see Marker


@dataclass
class _Encoder:
    """Converts a part of a text to ids."""

    indices: dict[str, int]  # that of a line's end is LINE_END's, since a word of the text may be called </s>
    unk_word: str
    unk: int  # −1: there is none
    dtype: np.dtype
    lack: str  # see Dictionary.lack
    marker: Marker | None = None
    replaced_before: bool = False

    def __call__(self, path: str, start: int, end: int) -> _Encoded:
        tokens, sizes = [np.empty(0, self.dtype)], [np.empty(0, np.int64)]
        replaced = carried = 0  # carried: words so far of a line that continues in the next block
        unfinished = False
        for text in text_blocks(path, start, end):
            words, lengths = self._words(text, carried)
            carried = lengths.pop()
            unfinished = not text.endswith("\n")
            ids = self._ids(words)
            if self.unk != NONE:
                replaced += int(np.count_nonzero(ids == self.unk))
                if not self.replaced_before:
                    replaced -= words.count(self.unk_word) * (self.indices.get(self.unk_word) == self.unk)
            tokens.append(ids)
            sizes.append(np.array(lengths, np.int64))
        if unfinished:
            tokens.append(self._ids([LINE_END]))
            sizes.append(np.array([carried + 1], np.int64))
        marks = self.marker.mark(text_blocks(path, start, end)) if self.marker is not None else None
        return _Encoded(np.concatenate(tokens), np.concatenate(sizes), replaced, marks)

    def _words(self, text: str, carried: int) -> tuple[list[str], list[int]]:
        """The words of a block, ``LINE_END`` at the end of each line; the lines' lengths, that of an open line last."""
        words: list[str] = []
        lengths: list[int] = []
        *lines, rest = text.split("\n")
        before = -carried
        for line in lines:
            words += line.split()
            words.append(LINE_END)
            lengths.append(len(words) - before)
            before = len(words)
        words += rest.split()
        lengths.append(len(words) - before)
        return words, lengths

    def _ids(self, words: list[str]) -> np.ndarray:
        if self.unk == NONE:
            for word in words:
                if word not in self.indices:
                    raise UserError(f"{word[:80]!r}: {self.lack}")
            return np.array([self.indices[word] for word in words], dtype=self.dtype)
        found = map(self.indices.get, words, itertools.repeat(self.unk))
        return np.fromiter(found, dtype=self.dtype, count=len(words))
