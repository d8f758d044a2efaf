"""Text to numbers, in several processes, a part of the file at a time."""

from __future__ import annotations

import collections
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq.data.indexed_dataset import IndexedWriter, token_dtype
from fairseq.system.workers import Workers
from fairseq.text.counting import over, text_blocks
from fairseq.text.dictionary import Dictionary
from fairseq.text.raw_text import no_words

# Stands for the end of a line among words: a lone surrogate, which no decoded UTF-8 holds.
_LINE_END = "\udc80"


@dataclass
class Summary:
    """Counts of a preprocessed text: lines, tokens (``</s>``
    included), words that were not in the dictionary.

    Among these words are those that are written like
    the padding symbol, which are counted as ``padding``, too.
    """

    sentences: int = 0
    tokens: int = 0
    replaced: int = 0
    padding: int = 0
    largest: int = 0  # id


class Binarizer:
    """Writes texts as corpora of a dictionary's ids.

    A line ends at ``\\n``, ``\\r`` or ``\\r\\n``; its words are what Unicode white space separates;
    ``</s>`` is added.

    Args:
        pool: of :func:`splitters` (default: this process).
        replaced_before: whether unknown symbols in the text count as replaced, as a tokenizer's do.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        pool: Workers[_Part] | None = None,
        replaced_before: bool = False,
    ) -> None:
        self._dictionary = dictionary
        self._dtype = token_dtype(len(dictionary))
        self._replaced_before = replaced_before
        self._pool = splitters(1) if pool is None else pool

    def binarize(self, path: str, prefix: str | Path) -> Summary:
        """Write the text *path* to *prefix* ``.bin`` and ``.idx``;
        the same bytes for any number of processes.

        Raises:
            UserError: the text is missing, empty or not UTF-8,
                or a process died; no file is written.
        """
        summary = Summary()
        with IndexedWriter(prefix, self._dtype) as writer:
            for part in over(self._pool, path, "writing"):
                numbers, table = part.numbers, self._table(part.words)
                # Distances between ends of lines, the end counted with its line.
                sizes = np.diff(np.flatnonzero(numbers == 0), prepend=-1)
                writer.add(table.ids[numbers], sizes)
                summary.sentences += len(sizes)
                summary.tokens += len(numbers)
                summary.replaced += int(np.count_nonzero(table.replaced[numbers]))
                if table.padding is not None:
                    summary.padding += int(np.count_nonzero(numbers == table.padding))
            summary.largest = writer.largest
            # Ends of lines alone are no corpus.
            if summary.tokens == summary.sentences:
                raise no_words(path)
        return summary

    def _table(self, words: list[str]) -> _Table:
        dictionary = self._dictionary
        ids = np.array([dictionary.eos_index, *map(dictionary.text_index, words)], self._dtype)
        replaced = ids == dictionary.unk_index
        # Some dictionaries have one symbol for the end of a line and for unknown words.
        replaced[0] = False
        # Where the text itself has the unknown symbol, it is a word like others; a tokenizer writes
        # it for other text.
        if not self._replaced_before and dictionary.unk_word in words:
            replaced[1 + words.index(dictionary.unk_word)] = False
        padding = 1 + words.index(dictionary.pad_word) if dictionary.pad_word in words else None
        # A dictionary may give the word an id beside the symbol's.
        return _Table(ids, replaced, padding if padding is not None and replaced[padding] else None)


@dataclass(frozen=True)
class _Table:
    """Tokens by number: their ids, whether these replace the words, and the number of the word
    ``<pad>``, if any."""

    ids: np.ndarray
    replaced: np.ndarray
    padding: int | None


@dataclass(frozen=True)
class _Part:
    """A part of a text: its different words in the order
    of their first appearance, and its tokens, as numbers."""

    words: list[str]
    numbers: np.ndarray  # unsigned [N], 1 + the index of a token's word, 0 for the ``</s>`` of a line


def splitters(workers: int) -> Workers[_Part]:
    """Processes that split parts of texts into words, for :class:`Binarizer`."""
    return Workers(_numbered, workers)


def _numbered(path: str, start: int, end: int) -> _Part:
    numbers = collections.defaultdict(itertools.count(1).__next__, {_LINE_END: 0})
    ids = [np.empty(0, np.uint32)]
    unfinished = False
    for text in text_blocks(path, start, end):
        # One split of all lines: no Python code runs per word or line.
        words = text.replace("\n", f" {_LINE_END} ").split()
        ids.append(np.fromiter(map(numbers.__getitem__, words), np.uint32, len(words)))
        unfinished = not text.endswith("\n")
    # The last line of a text may lack its line feed.
    ids.append(np.zeros(int(unfinished), np.uint32))
    return _Part(list(numbers)[1:], np.concatenate(ids).astype(np.min_scalar_type(len(numbers))))
