"""Rules that group subword symbols into words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar


class WordRule:
    """Rule that groups the symbols of a line into words;
    picklable, because worker processes receive it.

    A subclass knows by marks in symbols where words
    begin (:meth:`continues`) or end (:meth:`joins`).
    """

    ends_known: ClassVar[bool] = False  # whether the last symbol of a word shows that the word ends

    def group(self, tokens: list[str]) -> tuple[list[str], list[int]]:
        """Return the words of a line's *tokens*, in order,
        and the number of tokens of each; every token counts."""
        inner = [n > 0 and (self.joins(tokens[n - 1]) or self.continues(token)) for n, token in enumerate(tokens)]
        starts = [n for n, is_inner in enumerate(inner) if not is_inner]
        groups = [tokens[start:end] for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)]
        return [self._word(group) for group in groups], [len(group) for group in groups]

    def continues(self, symbol: str) -> bool:
        """Return whether *symbol* belongs to the word of the symbol before it."""
        return False

    def joins(self, symbol: str) -> bool:
        """Return whether the symbol after *symbol* belongs to its word."""
        return False

    def _word(self, tokens: list[str]) -> str:
        """The word of its *tokens*."""
        raise NotImplementedError


@dataclass(frozen=True)
class SubwordMarks(WordRule):
    """Words whose subwords, but for the last, end in a mark, as subword-nmt writes them:
    ``wo@@ r@@ ds``.

    A mark on the last token of a line is dropped: the end of the line ends the word.
    """

    mark: str = "@@"
    ends_known: ClassVar[bool] = True

    def group(self, tokens: list[str]) -> tuple[list[str], list[int]]:
        line = " ".join(tokens)
        if self.mark not in line:
            return tokens, [1] * len(tokens)
        # Two passes of the string's own methods instead
        # of a loop over tokens: this runs over whole corpora.
        words = line.replace(self.mark + " ", "").split(" ")
        words[-1] = words[-1].removesuffix(self.mark)
        # No token has white space in it, so a line feed can mark the joins.
        joins = line.replace(self.mark + " ", "\n").split(" ")
        return words, [word.count("\n") + 1 for word in joins]

    def joins(self, symbol: str) -> bool:
        return len(symbol) > len(self.mark) and symbol.endswith(self.mark)


@dataclass(frozen=True)
class BeginMarks(WordRule):
    """Words whose first symbol begins with a mark that stands for the space before:
    ``▁wo r ds``."""

    mark: str = "▁"

    def continues(self, symbol: str) -> bool:
        return not symbol.startswith(self.mark)

    def _word(self, tokens: list[str]) -> str:
        return "".join(tokens).replace(self.mark, "") or self.mark


@dataclass(frozen=True)
class ContinuationMarks(WordRule):
    """Words whose symbols, but for the first, begin with a mark: ``wo ##r ##ds``."""

    mark: str = "##"

    def continues(self, symbol: str) -> bool:
        return len(symbol) > len(self.mark) and symbol.startswith(self.mark)

    def _word(self, tokens: list[str]) -> str:
        # The first token as it is: at the beginning of a line a mark continues nothing.
        return tokens[0] + "".join(token.removeprefix(self.mark) for token in tokens[1:])


@dataclass(frozen=True)
class EndMarks(WordRule):
    """Words whose last symbol ends in a mark: ``wo r ds</w>``."""

    mark: str = "</w>"
    ends_known: ClassVar[bool] = True

    def joins(self, symbol: str) -> bool:
        return not symbol.endswith(self.mark)

    def _word(self, tokens: list[str]) -> str:
        return "".join(tokens).removesuffix(self.mark) or self.mark


# The character of each byte in byte-level encodings (Radford et al. 2019):
# printable ones stand for themselves, blanks and control characters
# get letters from U+0100 on, since no symbol may hold white space.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
SPACE = next(letter for letter, byte in BYTES.items() if byte == ord(" "))  # Ġ
LINE_END = re.compile(r"\r\n|\r|\n")  # between the lines of a text


@dataclass(frozen=True)
class ByteLevelWords(BeginMarks):
    """Words of byte-level symbols, in which ``Ġ`` stands for a space: ``Ġwo r ds``."""

    mark: str = SPACE

    def _word(self, tokens: list[str]) -> str:
        text = bytes_text("".join(tokens))
        return "".join(text.split()) or SPACE


def bytes_text(symbols: str, errors: str = "replace") -> str:
    """Return the text of byte-level *symbols*; other characters stand for themselves.

    Args:
        errors: how invalid bytes are decoded (default: as U+FFFD).
    """
    data = b"".join(bytes([BYTES[letter]]) if letter in BYTES else letter.encode() for letter in symbols)
    return data.decode("utf-8", errors)


def readable(symbol: str) -> str:
    """Return a byte-level *symbol* as people read it:
    ``␣`` for a space, escapes for line ends and single bytes."""
    text = bytes_text(symbol, "backslashreplace").replace(" ", "␣")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
