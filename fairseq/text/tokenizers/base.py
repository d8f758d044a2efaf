"""Interfaces of the two steps of a tokenizer: text to words, words to subword symbols.

Tokenizers are values: compared, pickled and saved by content. ``tokenization.json`` beside
``dict.txt`` holds all of one, with a fingerprint of the dictionary; training copies both beside the
checkpoints. A symbol never holds white space. A tokenizer's ``WordRule`` decides which tokens form
a word, for notes and for whole-word masking.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, NamedTuple

from fairseq.errors import UserError
from fairseq.text.tokenizers.rules import SubwordMarks, WordRule

UNKNOWN = "<unk>"
EXTRA = "pip install sentencepiece zstandard"
HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which is no character


class Span(NamedTuple):
    """A symbol and the characters *start* to *end* of the text that it stands for; none where the
    two are equal."""

    symbol: str
    start: int
    end: int

    def moved(self, count: int) -> Span:
        """Return the span in a text of which this one's is the part from *count* on."""
        return Span(self.symbol, self.start + count, self.end + count)


def aligned(text: str, symbols: Iterable[str], written: Iterable[str] | None = None, start: int = 0) -> list[Span]:
    """Return the spans of *symbols*, whose characters
    stand in *text* from *start* on in this order.

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
    """Return the spans in *line* of *subwords*,
    which were made of its *words* with single spaces between them."""
    origin: list[tuple[int, int]] = []  # of each character of the words as they were put together
    for word in words:
        if origin:
            # The blank between two words stands for what lies
            # between them in the line, which may be nothing.
            origin.append((origin[-1][1], word.start))
        if len(word.symbol) == word.end - word.start:
            origin += [(index, index + 1) for index in range(word.start, word.end)]
        else:
            origin += [(start, end) for _, start, end in aligned(line[: word.end], word.symbol, start=word.start)]
    starts = [start for start, _ in origin] + [origin[-1][1] if origin else 0]
    ends = [starts[0], *(end for _, end in origin)]
    return [Span(symbol, starts[start], max(starts[start], ends[end])) for symbol, start, end in subwords]


@dataclass(frozen=True)
class Value:
    """A frozen dataclass that may cache what it computes from its fields; only the fields are
    compared and pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # `cached_property` stores libraries' objects in the same `__dict__`; many cannot be
        # pickled, and workers make their own.
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclass(frozen=True)
class WordTokenizer(Value):
    """Words of a line of text and back. A subclass
    is a frozen dataclass whose fields are plain values."""

    def split(self, line: str) -> list[str]:
        """Return the words of *line*, without white space in them."""
        raise NotImplementedError

    def join(self, words: Sequence[str]) -> str:
        """Return the text of *words*."""
        raise NotImplementedError

    def spans(self, line: str) -> list[Span]:
        """Return the words of *line* with the text that each stands for."""
        return aligned(line, self.split(line))

    def check(self) -> None:
        """Raise UserError, whose message begins with its name, if a setting is invalid."""


@dataclass(frozen=True)
class Space(WordTokenizer):
    """Words that white space separates, unchanged."""

    def split(self, line: str) -> list[str]:
        return line.split()

    def join(self, words: Sequence[str]) -> str:
        return " ".join(words)


@dataclass(frozen=True)
class Subwords(Value):
    """Subword symbols of a line of words and back.

    Attributes:
        content: the file of codes or of the model.
        source: where it came from, for messages.
    """

    content: bytes = dataclasses.field(repr=False)
    source: str = dataclasses.field(default="", compare=False)

    rule: ClassVar[WordRule] = SubwordMarks()
    learns_lines: ClassVar[bool] = False
    """Whether :meth:`learn_lines` learns, not :meth:`learn`: where white space is part of
    symbols."""

    reads_lines: ClassVar[bool] = False
    """Whether the encoding reads a text with its line feeds, and decides what they are; else a text
    is lines."""

    @property
    def words(self) -> WordRule:
        """The rule that groups symbols into the words they were made of."""
        return self.rule

    @property
    def glue(self) -> str:
        """What separates the texts of parts of a line, as those around an unknown symbol."""
        return " "

    @classmethod
    def learn(cls, counts: Mapping[str, int], size: int) -> bytes:
        """Return the content of *size* merges or symbols
        that are learned from words and their counts.

        Raises:
            UserError: this kind cannot be learned here, or not from these words.
        """
        raise UserError("`learn_bpe`: only hf, subword_nmt and sentencepiece are learned; give a file with `bpe_codes`")

    @classmethod
    def learn_lines(cls, lines: Iterable[list[str]], size: int) -> bytes:
        """Return the content learned from batches of lines; see :meth:`learn`."""
        raise NotImplementedError

    @property
    def symbols(self) -> Sequence[str]:
        """Symbols that a dictionary made with learned content has,
        though the training text may lack them."""
        return ()

    def check(self) -> None:
        """Load the content; UserError if it is damaged
        or of another kind, or a package is missing."""
        raise NotImplementedError

    def encode(self, lines: Sequence[str]) -> list[str]:
        """Return the symbols of each of *lines*, separated by spaces."""
        raise NotImplementedError

    def spans(self, line: str) -> list[Span]:
        """Return the symbols of one line with the text that each stands for."""
        raise NotImplementedError

    def decode(self, symbols: Sequence[str]) -> str:
        """Return the words, or the text, of the symbols of one line."""
        raise NotImplementedError

    def knows(self, text: str) -> float:
        """Return the share of the characters of *text*,
        white space left out, that the encoding has symbols for."""
        # Each different character once: the share follows from the counts.
        letters = Counter("".join(text.split()))
        known = zip(letters, self.encode(list(letters)), strict=True)
        return sum(letters[letter] for letter, symbols in known if UNKNOWN not in symbols) / max(1, letters.total())

    @contextlib.contextmanager
    def library(self) -> Iterator[None]:
        """Turn what a library raises into a UserError about the content.

        Libraries raise errors of every type.
        """
        try:
            yield
        except (UserError, KeyboardInterrupt, GeneratorExit, MemoryError):
            raise
        # The panic of a library written in Rust is no Exception.
        except BaseException as error:
            raise self.invalid(f"{type(error).__name__}: {error}") from None

    def invalid(self, reason: object) -> UserError:
        """Return the error for a content that cannot be read."""
        text = " ".join(str(reason).split())[:200]
        return UserError(f"{self.source or '`bpe_codes`'}: cannot be read ({text}); give the file of the right kind")


def import_package(name: str, message: str) -> ModuleType:
    """Return an optional package, or raise UserError with *message* where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(message) from None


def spelled(symbols: Mapping[int, str]) -> dict[int, str]:
    """Return the symbol of each id as dictionaries and lines of symbols have it: all different, and
    without white space, which separates symbols.

    ``<0x20>`` stands for a space, and so on; ``_`` follows where another symbol is written alike,
    as ``<0xA0>``, the piece of a byte in SentencePiece models.
    """
    written = {index: symbol for index, symbol in symbols.items() if _is_word(symbol)}
    taken = set(written.values())
    for index, symbol in symbols.items():
        if index not in written:
            word = "".join(letter if _is_word(letter) else f"<0x{ord(letter):02X}>" for letter in symbol) or "<0x>"
            while word in taken:
                word += "_"
            written[index] = word
            taken.add(word)
    return written


def _is_word(symbol: str) -> bool:
    """Return whether UTF-8 can represent *symbol*, and splitting at white space gives it."""
    return symbol.split() == [symbol] and not HALF.search(symbol)


class Vocabulary:
    """Symbols of a library's ids, as :func:`spelled` writes them.

    Args:
        symbols: the symbol of each id.
        unknown: id of the unknown symbol, which is written ``<unk>``; None if there is none.
        source: the file, for messages.

    Raises:
        UserError: ``<unk>`` is another symbol.
    """

    def __init__(self, symbols: Mapping[int, str], unknown: int | None, source: str) -> None:
        # `<unk>` in the place of the library's name for it:
        # the dictionary's symbol, which is never split.
        table = spelled(symbols) | ({unknown: UNKNOWN} if unknown is not None else {})
        self.written = {symbols[index]: word for index, word in table.items()}
        self._plain = {word: symbols[index] for index, word in table.items() if index != unknown}
        if len(set(table.values())) < len(table):
            raise UserError(f"{source}: has another symbol {UNKNOWN} than the unknown one; remove it")
        # Where ids have no gaps, a list: this lookup is the only loop over symbols in Python.
        dense = table.keys() == set(range(len(table)))
        self._symbol = ([table[index] for index in range(len(table))] if dense else table).__getitem__

    def line(self, ids: Iterable[int]) -> str:
        """Return the symbols of *ids*, separated by spaces."""
        return " ".join(map(self._symbol, ids))

    def spans(self, ids: Iterable[int], offsets: Iterable[tuple[int, int]]) -> list[Span]:
        """Return the symbols of *ids* with their *offsets* in a text."""
        return [Span(self._symbol(index), *ends) for index, ends in zip(ids, offsets, strict=True)]

    def plain(self, symbols: Iterable[str]) -> list[str]:
        """Return written *symbols* as the library has them."""
        return [self._plain.get(symbol, symbol) for symbol in symbols]
