"""Text to word counts and to numbers, in several processes, a piece of the file at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fairseq.data.indexed_dataset import IndexedWriter, token_dtype
from fairseq.errors import UserError
from fairseq.notes.spans import NoteSpansWriter, number_dtype
from fairseq.notes.words import LINE_END, NoteWords, WordMarker, read_words
from fairseq.system.terminal import byte_bar
from fairseq.system.workers import Workers
from fairseq.text.dictionary import NONE, Dictionary
from fairseq.text.raw_text import BOM, check_raw, no_words
from fairseq.text.tokenizers.rules import SubwordMarks, WordRule

CHUNK_BYTES = 1 << 24  # given to a process at once
BLOCK_BYTES = 1 << 20  # decoded at once

R = TypeVar("R")


@dataclass
class Summary:
    """Counts of a preprocessed text: lines, tokens (``</s>`` included), words that were not in the dictionary."""

    sentences: int = 0
    tokens: int = 0
    replaced: int = 0


def count_words(paths: Iterable[str], workers: int = 1) -> Counter[str]:
    """Return the count of each word of the texts *paths*, counted by *workers* processes.

    Raises:
        UserError: a text is missing, empty or not UTF-8, or a process died.
    """
    return _count(_count_chunk, paths, workers, "counting")


def count_whole_words(paths: Iterable[str], rule: WordRule | None = None, workers: int = 1) -> Counter[str]:
    """Return the count of each word of the texts *paths*, its subwords joined by *rule* (default: ``@@`` marks).

    Raises:
        UserError: as :func:`count_words`.
    """
    return _count(_WordCounter(rule or SubwordMarks()), paths, workers, "counting words of")


def _count(
    task: Callable[[str, int, int], Counter[str]], paths: Iterable[str], workers: int, doing: str
) -> Counter[str]:
    counter: Counter[str] = Counter()
    with Workers(task, workers) as pool:
        for path in paths:
            for counts in _over(pool, path, doing):
                counter.update(counts)
    return counter


class Binarizer:
    """Writes texts as corpora of a dictionary's ids; a context manager that keeps its processes from text to text.

    A line ends at ``\\n``, ``\\r`` or ``\\r\\n``; its words are what Unicode white space separates; ``</s>`` is added.

    Args:
        dictionary: gives the ids.
        workers: processes.
        notes: rare words whose places are written beside each corpus; None: nothing is.
        rule: how tokens make words, for *notes* (default: ``@@`` marks).
        replaced_before: whether unknown symbols in the text count as replaced, as those of a tokenizer do.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        workers: int = 1,
        notes: NoteWords | None = None,
        rule: WordRule | None = None,
        replaced_before: bool = False,
    ) -> None:
        self._dtype = token_dtype(len(dictionary))
        self._dictionary = dictionary
        self._notes = notes
        marker = WordMarker(notes, rule or SubwordMarks(), number_dtype(len(notes))) if notes is not None else None
        encoder = _Encoder(
            {**dictionary.indices, LINE_END: dictionary.eos_index},
            dictionary.unk_word,
            dictionary.unk_index,
            self._dtype,
            dictionary.lack(),
            marker,
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

        With notes, ``.notes.bin`` and ``.notes.idx`` too, see :mod:`fairseq.notes.spans`.

        Raises:
            UserError: the text is missing, empty or not UTF-8, or a process died; no file is written.
        """
        summary = Summary()
        with contextlib.ExitStack() as files:
            writer = files.enter_context(IndexedWriter(prefix, self._dtype))
            marks = None
            if self._notes is not None:
                marks = files.enter_context(NoteSpansWriter(prefix, self._notes, self._dictionary))
            for encoded in _over(self._pool, path, "writing"):
                writer.add(encoded.tokens, encoded.sizes)
                if marks is not None and encoded.marks is not None:
                    marks.add(*encoded.marks)
                summary.sentences += len(encoded.sizes)
                summary.tokens += len(encoded.tokens)
                summary.replaced += encoded.replaced
            if summary.tokens == summary.sentences:
                raise no_words(path)
        return summary


def _chunks(path: str, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a file, without a byte-order mark, behind line feeds into parts of about *chunk_bytes*: (first byte, end)."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = len(BOM) if file.read(len(BOM)) == BOM else 0
        while start < size:
            end = start + chunk_bytes
            file.seek(end)
            while end < size and (block := file.read(BLOCK_BYTES)):
                found = block.find(b"\n")
                if found >= 0:
                    end += found + 1
                    break
                end += len(block)
            yield start, min(end, size)
            start = end


def _text_blocks(path: str, start: int, end: int) -> Iterator[str]:
    """The text between two bytes, its lines ended by ``\\n``, in pieces that end behind a line or at a space.

    A line longer than a piece is cut at a space, so that memory does not depend on how long lines are.
    """
    rest = b""
    with open(path, "rb") as file:
        file.seek(start)
        while start + len(rest) < end:
            block = file.read(min(BLOCK_BYTES, end - start - len(rest)))
            if not block:
                raise UserError(f"{path}: the text became shorter while it was read; start again when it is complete")
            rest += block
            cut = len(rest) if start + len(rest) >= end else (rest.rfind(b"\n") + 1 or rest.rfind(b" ") + 1)
            if cut:
                try:
                    text = rest[:cut].decode("utf-8")
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, start + error.start) from None
                yield text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
                start, rest = start + cut, rest[cut:]


def _not_utf8(path: str, offset: int) -> UserError:
    """Return the error for an invalid UTF-8 byte, with its line number."""
    line, at_return = 1, False
    with open(path, "rb") as file:
        for at in range(0, offset, BLOCK_BYTES):
            block = file.read(min(BLOCK_BYTES, offset - at))
            line += block.count(b"\n") + block.count(b"\r") - block.count(b"\r\n")
            line -= at_return and block.startswith(b"\n")  # one line end, cut in two
            at_return = block.endswith(b"\r")
        file.seek(offset)
        byte = file.read(1)
    return UserError(
        f"{path}: line {line}, byte offset {offset}: 0x{byte.hex()} is not UTF-8; convert the text, as with iconv"
    )


def _count_chunk(path: str, start: int, end: int) -> Counter[str]:
    counter: Counter[str] = Counter()
    for text in _text_blocks(path, start, end):
        counter.update(text.split())
    return counter


@dataclass(frozen=True)
class _WordCounter:
    """Counts the whole words of a part of a text."""

    rule: WordRule

    def __call__(self, path: str, start: int, end: int) -> Counter[str]:
        counter: Counter[str] = Counter()
        for words, _ in read_words(_text_blocks(path, start, end), self.rule):
            counter.update(words)
        del counter[LINE_END]
        return counter


@dataclass(frozen=True)
class _Encoded:
    """A part of a text: tokens [N], sizes of its lines [lines], words replaced by the unknown symbol, notes' marks."""

    tokens: np.ndarray
    sizes: np.ndarray
    replaced: int
    marks: tuple[np.ndarray, np.ndarray] | None  # see WordMarker.mark


@dataclass
class _Encoder:
    """Converts a part of a text to ids."""

    indices: dict[str, int]  # that of a line's end is LINE_END's, since a word of the text may be called </s>
    unk_word: str
    unk: int  # −1: there is none
    dtype: np.dtype
    lack: str  # see Dictionary.lack
    marker: WordMarker | None = None
    replaced_before: bool = False

    def __call__(self, path: str, start: int, end: int) -> _Encoded:
        tokens, sizes = [np.empty(0, self.dtype)], [np.empty(0, np.int64)]
        replaced = carried = 0  # carried: words so far of a line that continues in the next block
        unfinished = False
        for text in _text_blocks(path, start, end):
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
        marks = self.marker.mark(_text_blocks(path, start, end)) if self.marker is not None else None
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


def _over(pool: Workers[R], path: str, doing: str) -> Iterator[R]:
    """The results of the pool's ``task(path, start, end)`` for the parts of *path*, in order, with a progress bar."""
    size = check_raw(path)
    chunks = list(_chunks(path, min(CHUNK_BYTES, -(-size // pool.count))))
    with byte_bar(size, f"{doing} {os.path.basename(path)}") as report:
        results = pool.map((path, start, end) for start, end in chunks)
        for (start, end), result in zip(chunks, results, strict=True):
            report(end - start)
            yield result
