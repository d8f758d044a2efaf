"""Rare words with notes (Wu et al. 2021, "Taking Notes on the Fly", section 3.1).

A *word* here is a word of the text before it was split into subwords. The
:class:`~fairseq.text.tokenizers.rules.WordRule` of a tokenizer groups tokens into words.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq.errors import UserError
from fairseq.system import checksums
from fairseq.system.files import atomic_file
from fairseq.system.opening import decoded, read_named
from fairseq.text.counting import read_words, text_blocks
from fairseq.text.dictionary import DIGITS, Dictionary
from fairseq.text.tokenizers import find_tokenizer
from fairseq.text.tokenizers.rules import SubwordMarks, WordRule

NOTES = "notes.txt"
AGAIN = "run fairseq-preprocess --notes again"


@dataclass(frozen=True)
class NoteWords:
    """The words that have notes, numbered from 0, and their occurrences in the training text.

    Attributes:
        words: sorted by falling count, ties in code-point order.
        counts: occurrences of each word.
    """

    words: tuple[str, ...]
    counts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def choose(cls, counter: Mapping[str, int], low: int, high: int, dictionary: Dictionary) -> NoteWords:
        """Return the words of *counter* that occur *low*
        to *high* times; special symbols are excluded.

        Raises:
            UserError: no word occurs that often.
        """
        # Special symbols in text are no words, and `<unk>` stands for many.
        special = {dictionary.bos_word, dictionary.pad_word, dictionary.eos_word, dictionary.unk_word, ""}
        chosen = [(word, n) for word, n in counter.items() if low <= n <= high and word not in special]
        if not chosen:
            raise UserError(
                f"`note_min_count` {low}, `note_max_count` {high}: no word of the training text occurs that often; "
                f"the most frequent occurs {max(counter.values(), default=0)} times"
            )
        chosen.sort(key=lambda item: (-item[1], item[0]))
        words, counts = zip(*chosen, strict=True)
        return cls(words, counts)

    def save(self, folder: str | Path) -> None:
        """Write ``notes.txt``, a line ``word count`` for each word."""
        with atomic_file(os.path.join(folder, NOTES)) as file:
            file.write(self._text())

    @classmethod
    def load(cls, folder: str | Path) -> NoteWords:
        """Read ``notes.txt``.

        Raises:
            UserError: it is missing, not UTF-8 or truncated, or has a word twice.
        """
        path = os.path.join(folder, NOTES)
        content = read_named(path, "run fairseq-preprocess --notes")
        checksums.check(path, content)
        text = decoded(content, path, AGAIN)
        words: dict[str, int] = {}
        for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
            word, _, count = line.rpartition(" ")
            if not word or word in words or not (count.isascii() and count.isdigit() and len(count) <= DIGITS):
                raise UserError(f"{path}: line {number}: expected `word count`, found {line[:80]!r}; {AGAIN}")
            words[word] = int(count)
        return cls(tuple(words), tuple(words.values()))

    def fingerprint(self, dictionary: Dictionary) -> bytes:
        """Return 32 bytes that change with any word or count
        of the notes and any symbol of *dictionary*."""
        digest = bytes.fromhex(checksums.fingerprint(dictionary.symbols))
        return hashlib.sha256(digest + self._text()).digest()

    def _text(self) -> bytes:
        return "".join(f"{word} {n}\n" for word, n in zip(self.words, self.counts, strict=True)).encode()


def note_rule(dictionary: Dictionary) -> WordRule:
    """The rule that groups the symbols of *dictionary* into
    words with notes: its tokenizer's, else ``@@`` marks.

    Raises:
        UserError: the tokenizer cannot be read, or belongs to another dictionary.
    """
    tokenizer = find_tokenizer(dictionary.path, dictionary.symbols) if dictionary.path is not None else None
    return tokenizer.rule if tokenizer is not None else SubwordMarks()


class WordMarker:
    """Finder of words with notes in a part of a text;
    picklable, because worker processes receive it."""

    def __init__(self, notes: NoteWords, rule: WordRule, dtype: np.dtype) -> None:
        self._numbers = {word: number for number, word in enumerate(notes.words, 1)}
        self._rule = rule
        self._dtype = dtype

    def __call__(self, path: str, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each token's word [N], from 1 (0: no note), and whether a word
        begins there, bool [N].

        The tokens are the text between two bytes of a file, with the ``</s>`` of each line.
        """
        numbers, begins = [np.empty(0, self._dtype)], [np.empty(0, bool)]
        for words, lengths in read_words(text_blocks(path, start, end), self._rule):
            numbers_of_words = map(self._numbers.get, words, itertools.repeat(0))
            counts = np.array(lengths, np.int64)
            numbers.append(np.repeat(np.fromiter(numbers_of_words, self._dtype, len(words)), counts))
            begins.append(np.zeros(len(numbers[-1]), bool))
            begins[-1][np.cumsum(counts) - counts] = True
        return np.concatenate(numbers), np.concatenate(begins)
