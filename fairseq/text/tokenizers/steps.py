"""The two steps of a tokenizer, one after the other: words, then subwords."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fairseq.text.tokenizers.base import UNKNOWN, Subwords, Value, WordTokenizer
from fairseq.text.tokenizers.spans import Span, composed


@dataclass(frozen=True)
class Steps(Value):
    """Text to symbols and back: words, then subwords.

    ``<unk>`` in text is the unknown symbol.

    Attributes:
        words: the word tokenizer; None: subwords are made of the text as it is.
        subwords: the subword encoding; None: words are symbols.
    """

    words: WordTokenizer | None = None
    subwords: Subwords | None = None

    def encode_lines(self, lines: Sequence[str]) -> list[str]:
        """Return the symbols of each of *lines*, separated by spaces."""
        if any(UNKNOWN in line for line in lines):
            return [self.encode(line) for line in lines]
        return self._encode(lines)

    def encode(self, line: str) -> str:
        """Return the symbols of one line, separated by spaces."""
        # Cut out before encoding: subwords would split `<unk>` into brackets and letters.
        parts = self._encode(line.split(UNKNOWN))
        return f" {UNKNOWN} ".join(parts).strip() if len(parts) > 1 else parts[0]

    def spans(self, line: str) -> list[Span]:
        """Return the symbols that :meth:`encode` makes of one line, with the text that each stands for."""
        spans, start = [], 0
        for number, part in enumerate(line.split(UNKNOWN)):
            if number:
                spans.append(Span(UNKNOWN, start - len(UNKNOWN), start))
            spans += [span.moved(start) for span in self._spans(part)]
            start += len(part) + len(UNKNOWN)
        return spans

    def decode(self, symbols: Iterable[str]) -> str:
        """Return the text of the symbols of one line."""
        symbols = list(symbols)
        if self.subwords is None:
            assert self.words is not None
            return self.words.join(symbols)
        text = self._decode(symbols, self.subwords)
        return self.words.join(text.split()) if self.words is not None else text

    def _encode(self, lines: Sequence[str]) -> list[str]:
        if self.words is not None:
            split = self.words.split
            lines = [" ".join(split(line)) for line in lines]
        return self.subwords.encode(lines) if self.subwords is not None else list(lines)

    def _spans(self, line: str) -> list[Span]:
        if self.words is None:
            assert self.subwords is not None
            return self.subwords.spans(line)
        words = self.words.spans(line)
        if self.subwords is None:
            return words
        return composed(line, words, self.subwords.spans(" ".join(word.symbol for word in words)))

    def _decode(self, symbols: Sequence[str], subwords: Subwords) -> str:
        """The words of *symbols*; unknown ones stand for themselves."""
        parts: list[list[str]] = [[]]
        for symbol in symbols:
            if symbol == UNKNOWN:
                parts.append([])
            else:
                parts[-1].append(symbol)
        mark = f"{subwords.glue}{UNKNOWN}{subwords.glue}"
        return mark.join(subwords.decode(part) if part else "" for part in parts).strip(subwords.glue)
