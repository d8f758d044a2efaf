"""Spans: the part of a text that each symbol of it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """A symbol and the characters *start* to *end* of the text that it stands for; none where the two are equal."""

    symbol: str
    start: int
    end: int

    def moved(self, count: int) -> Span:
        """Return the span in a text of which this one's is the part from *count* on."""
        return Span(self.symbol, self.start + count, self.end + count)


def aligned(text: str, symbols: Iterable[str], written: Iterable[str] | None = None, start: int = 0) -> list[Span]:
    """Return the spans of *symbols*, whose characters stand in *text* from *start* on in this order.

    Args:
        written: the characters of each symbol, where they are not the symbol itself.
    """
    symbols = list(symbols)
    spans = []
    for symbol, letters in zip(symbols, written or symbols, strict=True):
        first = text.find(letters, start)
        # Only white space lies between symbols: farther on it is another occurrence.
        if first >= 0 and not text[start:first].strip():
            start = first + len(letters)
        # Control characters were dropped inside it or before it.
        else:
            first = -1
            for letter in letters:
                index = text.find(letter, start)
                if index >= 0:
                    first, start = (index if first < 0 else first), index + 1
            first = start if first < 0 else first
        spans.append(Span(symbol, first, start))
    return spans


def composed(line: str, words: Sequence[Span], subwords: Iterable[Span]) -> list[Span]:
    """Return the spans in *line* of *subwords*, which were made of its *words* with single spaces between them."""
    origin: list[tuple[int, int]] = []  # of each character of the words as they were put together
    for word in words:
        if origin:
            # The blank between two words stands for what lies between them in the line, which may be nothing.
            origin.append((origin[-1][1], word.start))
        if len(word.symbol) == word.end - word.start:
            origin += [(index, index + 1) for index in range(word.start, word.end)]
        else:
            origin += [(start, end) for _, start, end in aligned(line[: word.end], word.symbol, start=word.start)]
    starts = [start for start, _ in origin] + [origin[-1][1] if origin else 0]
    ends = [starts[0], *(end for _, end in origin)]
    return [Span(symbol, starts[start], max(starts[start], ends[end])) for symbol, start, end in subwords]
