"""Positions of the rare words of a corpus: two arrays aligned with its tokens, in files.

``PREFIX.notes.bin`` holds an unsigned number a token, little endian: 0 where its word has no note,
else the word's number in ``notes.txt``, from 1. ``PREFIX.notes.idx`` holds, little endian: the
magic bytes, a version (uint64), the bytes of such a number (uint8), tokens (uint64), words
(uint64), a fingerprint of dictionary and ``notes.txt`` (32 bytes), and a bit a token, lowest first:
whether a word begins there. A line's ``</s>`` is a word.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fairseq.data.indexed_dataset import JoinedArray, mapped, token_count
from fairseq.errors import UserError
from fairseq.notes.words import AGAIN, NOTES, NoteWords, WordMarker
from fairseq.system.files import atomic_file
from fairseq.system.opening import read_errors
from fairseq.system.workers import Workers
from fairseq.text.counting import over
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.rules import WordRule

MAGIC = b"FSNOTES\x00"
VERSION = 1
_HEADER = struct.Struct("<8sQBQQ32s")  # magic, version, bytes a number, tokens, words, fingerprint


def number_dtype(words: int) -> np.dtype:
    """The smallest type that holds the numbers 0 … *words*."""
    return next(np.dtype(name) for name in ("<u1", "<u2", "<u4") if words <= np.iinfo(name).max)


def write_spans(
    prefix: str | Path, notes: NoteWords, dictionary: Dictionary, parts: Iterable[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Write the two files beside a corpus, both whole or none.

    Args:
        prefix: path of the corpus without ``.bin`` and ``.idx``.
        notes: the words that have notes.
        dictionary: of the corpus.
        parts: for consecutive tokens the number of each one's word [N] (0: no note), and whether a
            word begins there, bool [N].
    """
    dtype, tokens = number_dtype(len(notes)), 0
    rest = np.empty(0, dtype=bool)  # bits that do not fill a byte yet
    # Closed in the opposite order: the numbers are in place
    # before the index, whose presence implies them.
    with atomic_file(f"{prefix}.notes.idx") as index, atomic_file(f"{prefix}.notes.bin") as file:
        index.write(bytes(_HEADER.size))
        for numbers, begins in parts:
            file.write(np.ascontiguousarray(numbers, dtype=dtype).data)
            # Parts need not end at a byte; the rest waits for the next one.
            bits = np.concatenate([rest, begins])
            full_bytes = len(bits) - len(bits) % 8
            index.write(np.packbits(bits[:full_bytes], bitorder="little").data)
            rest = bits[full_bytes:]
            tokens += len(numbers)
        index.write(np.packbits(rest, bitorder="little").data)
        index.seek(0)
        fingerprint = notes.fingerprint(dictionary)
        index.write(_HEADER.pack(MAGIC, VERSION, dtype.itemsize, tokens, len(notes), fingerprint))


def mark_texts(
    texts: Mapping[Path, str], notes: NoteWords, dictionary: Dictionary, rule: WordRule, workers: int = 1
) -> None:
    """Write the files beside the corpora of *texts*,
    by prefix, whose words *workers* processes find.

    Args:
        rule: how tokens make words.
    """
    with Workers(WordMarker(notes, rule, number_dtype(len(notes))), workers) as pool:
        for prefix, path in texts.items():
            write_spans(prefix, notes, dictionary, over(pool, path, "marking words of"))


class NoteSpans:
    """The occurrences of rare words in windows of a corpus.

    A word has a span where the window contains all of its tokens. A word cut by an edge has none:
    half of it is another word, and there are at most two a window.

    Args:
        prefix: path of the corpus without ``.bin`` and ``.idx``,
            or several that are read one after the other.
        dictionary: of the corpus (default: the ``dict.txt`` beside it).
        notes: the words (default: the ``notes.txt`` beside the corpus).

    Raises:
        UserError: a file is missing or truncated, or was
            made for another corpus, dictionary or ``notes.txt``.

    Attributes:
        notes: the words; a span's word is a number of theirs.
        fingerprint: of dictionary and words.
    """

    def __init__(
        self,
        prefix: str | Path | Sequence[str | Path],
        dictionary: Dictionary | None = None,
        notes: NoteWords | None = None,
    ) -> None:
        prefixes = [os.fspath(p) for p in ([prefix] if isinstance(prefix, str | Path) else prefix)]
        folder = os.path.dirname(prefixes[0])
        self.notes = notes or NoteWords.load(folder)
        dictionary = dictionary or Dictionary.load(os.path.join(folder, "dict.txt"))
        # Once, since it takes long where there are many words.
        self.fingerprint = self.notes.fingerprint(dictionary)
        files = [_open(path, self.fingerprint, len(self.notes), dictionary.path) for path in prefixes]
        self._numbers = JoinedArray([numbers for numbers, _ in files])
        self._begins = JoinedArray([_Bits(bits, len(numbers)) for numbers, bits in files])

    def __len__(self) -> int:
        """Tokens of the corpus."""
        return len(self._numbers)

    def spans(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the rare words in the windows ``tokens[starts[b] : starts[b] + lengths[b]]``.

        Args:
            starts: int64 [B]; −1 for a row that begins with the ``</s>`` before the corpus.
            lengths: integers [B], at least 1; the windows lie in the corpus.

        Returns:
            int64 [S, 4], by row and position: row,
                first token and end (exclusive) within the row, word.
        """
        column = np.arange(int(np.max(lengths, initial=0)) + 1)
        return self.spans_at(np.asarray(starts, dtype=np.int64)[:, None] + column, lengths)

    def spans_at(self, positions: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the same for rows that read the corpus at *positions*.

        Args:
            positions: int64 [B, T + 1], tokens at the columns of a row
                and the one after it, of which each word's are consecutive;
                outside the corpus (−1, or its length) there is no word.
            lengths: integers [B], up to T; columns behind a row's length are not read.
        """
        begins, numbers = self.begins_at(positions), self._numbers_at(positions)
        column = np.arange(positions.shape[1])
        lengths = np.asarray(lengths)[:, None]
        first = begins & (column < lengths) & (numbers > 0)
        rows, columns = np.nonzero(first)
        if len(rows) == 0:
            return np.empty((0, 4), dtype=np.int64)
        # The next beginning after each word's, over all rows: where it is not within the row, the
        # word is cut.
        flat = np.flatnonzero(begins.ravel())
        width = positions.shape[1]
        here = rows * width + columns
        after = np.searchsorted(flat, here, side="right")
        # A word ends where the next begins; the added end stands for the last word of the last row.
        ends = np.append(flat, begins.size)[after] - rows * width
        complete = ends <= lengths[rows, 0]
        words = numbers[rows, columns].astype(np.int64) - 1
        return np.stack([rows, columns, ends, words], axis=1)[complete].astype(np.int64)

    def rare_at(self, positions: np.ndarray) -> np.ndarray:
        """Return whether the tokens at *positions*, int64 of any shape, belong to rare words, whole
        or not: bool."""
        return self._numbers_at(positions) > 0

    def _numbers_at(self, positions: np.ndarray) -> np.ndarray:
        """The numbers at *positions*, 0 outside the corpus."""
        inside, nearest = self._inside(positions)
        return np.where(inside, self._numbers[nearest], 0)

    def begins_at(self, positions: np.ndarray) -> np.ndarray:
        """Return whether a word begins at each of *positions*,
        int64 of any shape; true outside the corpus."""
        inside, nearest = self._inside(positions)
        # A beginning behind the corpus ends its last word.
        return self._begins[nearest] | ~inside

    def _inside(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of *positions* are in the corpus, and the nearest ones that are: rows stay
        runs of the file."""
        return (positions >= 0) & (positions < len(self)), np.clip(positions, 0, len(self) - 1)


class _Bits:
    """Bits of bytes, lowest first, as booleans at positions of any shape."""

    dtype = np.dtype(bool)

    def __init__(self, stored: np.ndarray, count: int) -> None:
        self._bytes, self._count = stored, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        return (self._bytes[positions >> 3] >> (positions & 7).astype(np.uint8)) & 1 > 0


def _open(prefix: str, fingerprint: bytes, words: int, dictionary: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The numbers [N] and bits of one corpus, once they
    are known to belong to it, to *fingerprint* and *words*."""
    index, numbers = f"{prefix}.notes.idx", f"{prefix}.notes.bin"
    header, _ = _begin(index)
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise UserError(f"{index}: not an index of notes; {AGAIN}")
    _, version, size, tokens, *made_for = _HEADER.unpack(header)
    if version != VERSION or size not in (1, 2, 4):
        raise UserError(f"{index}: version {version} of the format, known is {VERSION}; {AGAIN}")
    for path, length in ((index, _HEADER.size + -(-tokens // 8)), (numbers, tokens * size)):
        if (actual := _begin(path)[1]) != length:
            raise UserError(f"{path}: {actual} bytes instead of {length} for {tokens} tokens; {AGAIN}")
    if made_for != [words, fingerprint]:
        raise UserError(f"{index}: made for another dict.txt or {NOTES} than {dictionary}'s; {AGAIN}")
    corpus = token_count(prefix)
    if corpus != tokens:
        raise UserError(f"{index}: made for {tokens} tokens, but {prefix}.bin has {corpus}; {AGAIN}")
    return mapped(numbers, f"<u{size}", tokens), mapped(index, "<u1", -(-tokens // 8), _HEADER.size)


def _begin(path: str) -> tuple[bytes, int]:
    """The first bytes of a file, as many as a header has, and its size."""
    with read_errors(path, "run fairseq-preprocess --notes"), open(path, "rb") as file:
        return file.read(_HEADER.size), os.fstat(file.fileno()).st_size
