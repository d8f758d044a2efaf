"""Whole words of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairseq.data.masking import special_symbols, word_parts, word_rule
from fairseq.text.dictionary import Dictionary
from fairseq.text.tokenizers.rules import ContinuationMarks, SubwordMarks

PIECE = 1 << 22  # tokens grouped at once


class WordGroups:
    """Groups the tokens of a dictionary into words; UserError if the tokenizer beside it cannot be read."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.symbols, self.unknown = dictionary.symbols, dictionary.unk()
        self.rule, self.special = word_rule(dictionary), special_symbols(dictionary)
        # Special symbols may look like parts of words: `<s>` begins with no mark of a word's beginning.
        self.continues, self.joins = (mask & ~self.special for mask in word_parts(dictionary, self.rule))

    def first(self, tokens: np.ndarray, lines: np.ndarray | None = None) -> np.ndarray:
        """Indices of the first token of each word of *tokens*; a special symbol is a word.

        Args:
            lines: indices at which lines begin, where no symbol ends them.
        """
        before, after = tokens[:-1], tokens[1:]
        joined = self.continues[after] & ~self.special[before] | self.joins[before] & ~self.special[after]
        begins = np.append(np.ones(min(1, len(tokens)), bool), ~joined)
        if lines is not None:
            begins[lines[lines < len(tokens)]] = True
        return np.flatnonzero(begins)

    def text(self, ids: Sequence[int]) -> str:
        symbols = [self.symbols[index] for index in ids]
        # Without a rule words have either kind of marks, see `word_parts`.
        if self.rule is None:
            symbols = [symbols[0], *(symbol.removeprefix(ContinuationMarks.mark) for symbol in symbols[1:])]
        return "".join((self.rule or SubwordMarks()).group(symbols)[0])

    def counts(self, tokens: Any) -> Counter[str]:
        """Return the count of each word of *tokens*, an array [N] or a corpus's, of which a piece is read at once."""
        # Words of one token, most of all, are counted by their id; only the others as sequences.
        single, several = np.zeros(len(self.symbols), np.int64), Counter[bytes]()
        rest = np.empty(0, np.int32)
        for start in range(0, len(tokens), PIECE):
            piece = np.append(rest, np.asarray(tokens[start : start + PIECE]).astype(np.int32))
            first = self.first(piece)
            ends = np.append(first[1:], len(piece))
            rest = piece[:0]
            if start + PIECE < len(tokens):  # the last word may go on
                rest, first, ends = piece[first[-1] :], first[:-1], ends[:-1]
            alone = ends - first == 1
            single += np.bincount(piece[first[alone]], minlength=len(single))
            # Bytes are hashed at once; tuples of ids would be made one Python integer at a time.
            data, bounds = piece.tobytes(), np.stack([first, ends], 1)[~alone] * piece.itemsize
            several.update(data[begin:end] for begin, end in bounds.tolist())
        counter = Counter[str]()
        for index in np.flatnonzero(single * ~self.special).tolist():
            counter[self.text([index])] += int(single[index])
        for word, count in several.items():
            counter[self.text(np.frombuffer(word, np.int32).tolist())] += count
        return counter
