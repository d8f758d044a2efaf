"""Conversion between running text and dictionary tokens: words, characters or bytes."""

from __future__ import annotations

import codecs
import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

from fairseq.text.dictionary import Dictionary

SPACES = ("_", "▁", "␣", "<space>")  # symbols for a space in character corpora
BYTES = frozenset(map(str, range(256)))
LONGEST_HEADING = 40  # words
LONGEST_TAIL = 64  # words of a line that are detokenized again for each token
JOINTS = {"@-@": "-", "@,@": ",", "@.@": "."}  # WikiText's marks inside words


def never_written(dictionary: Dictionary) -> list[int]:
    """Indices that never occur in text: special symbols other than the end of a line, and fillers."""
    special = {dictionary.bos(), dictionary.pad(), dictionary.unk(), *range(dictionary.nspecial)}
    fillers = {
        index
        for index, (word, count) in enumerate(zip(dictionary.symbols, dictionary.count, strict=True))
        if word.startswith("madeupword") and count == 0
    }
    return sorted(index for index in special | fillers if index >= 0 and index != dictionary.eos())


def detokenizer_of(dictionary: Dictionary, remove_bpe: str | None = None) -> Detokenizer:
    """The detokenizer for *dictionary*: for bytes, for characters, or else for words.

    Args:
        remove_bpe: suffix of a subword that is continued by the next one, such as ``@@``.
    """
    special = set(never_written(dictionary)) | {dictionary.eos()}
    symbols = [word for index, word in enumerate(dictionary.symbols) if index not in special]
    # By the symbols alone: such data hold no tokenizer that would say so.
    if symbols and BYTES.issuperset(symbols):
        return ByteDetokenizer(dictionary)
    if symbols and all(len(word) == 1 or word in SPACES for word in symbols):
        return CharacterDetokenizer(dictionary)
    return Detokenizer(dictionary, remove_bpe.strip() if remove_bpe else None)


class Detokenizer:
    """Tokens are words separated by white space. Text is detokenized with sacremoses; heading markup and WikiText's
    marks are removed.

    Args:
        dictionary: of the tokens.
        mark: suffix of a subword that is continued by the next one.
    """

    def __init__(self, dictionary: Dictionary, mark: str | None = None) -> None:
        self.dictionary = dictionary
        self.mark = mark

    def split(self, text: str) -> list[str]:
        """The symbols of one line, including unknown ones."""
        return text.split()

    def encode(self, text: str) -> tuple[list[int], list[str]]:
        """The tokens of one line without ``</s>``, and its symbols that are not in the dictionary, each time."""
        symbols = self.split(text)
        unknown = [symbol for symbol in symbols if symbol not in self.dictionary]
        return [self.dictionary.index(symbol) for symbol in symbols], unknown

    def stream(self) -> Stream:
        """A new incremental decoder."""
        return WordStream(self.dictionary, self.mark)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of *tokens*; ``</s>`` becomes a line feed."""
        stream = self.stream()
        return stream.add(tokens) + stream.end()


class CharacterDetokenizer(Detokenizer):
    """Tokens are characters. A space is one of :data:`SPACES`, or ``</s>`` if there is none, as in text8."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        line_end = dictionary[dictionary.eos()]
        self.space = next((symbol for symbol in SPACES if symbol in dictionary), line_end)

    def split(self, text: str) -> list[str]:
        return [self.space if character.isspace() else character for character in text]

    def stream(self) -> Stream:
        return CharacterStream(self.dictionary, self.space)


class ByteDetokenizer(Detokenizer):
    """Tokens are UTF-8 bytes as decimal numbers, as in enwik8; the end of a line is byte 10."""

    def split(self, text: str) -> list[str]:
        # Bytes that are not UTF-8 arrive from a command line or a pipe as lone surrogates.
        return [str(byte) for byte in text.encode("utf-8", "surrogateescape")]

    def stream(self) -> Stream:
        return ByteStream(self.dictionary)


class Stream:
    """Incremental decoder: the concatenated pieces equal the text of all tokens."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary

    def add(self, tokens: Iterable[int]) -> str:
        """Read *tokens*; return the text that later tokens cannot change."""
        raise NotImplementedError

    def pause(self) -> str:
        """Return buffered text at the end of a prompt; the continuation is shown separately."""
        return ""

    def end(self) -> str:
        """Return buffered text at the end of the text."""
        return self.pause()


class CharacterStream(Stream):
    """Decoder of characters."""

    def __init__(self, dictionary: Dictionary, space: str) -> None:
        super().__init__(dictionary)
        self.special = {dictionary.eos(): "\n"} | {dictionary.index(space): " "}

    def add(self, tokens: Iterable[int]) -> str:
        return "".join(self.special.get(token, self.dictionary[token]) for token in tokens)


class ByteStream(Stream):
    """Decoder of bytes; a character is returned with its last byte."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Iterable[int]) -> str:
        return "".join(self._add(token) for token in tokens)

    def end(self) -> str:
        return self.decoder.decode(b"", final=True)

    def _add(self, token: int) -> str:
        symbol = "10" if token == self.dictionary.eos() else self.dictionary[token]
        return self.decoder.decode(bytes([int(symbol)]) if symbol in BYTES else symbol.encode())


class WordStream(Stream):
    """Decoder of words, detokenized with sacremoses. A word's text depends only on the words before it in its line.

    Only the last words of a line are kept; :func:`shortened` summarises the earlier ones, so that the cost of a token
    does not grow with the length of its line. A line that may be a heading (``= = Title = =``) is buffered until it
    ends or turns out not to be one.
    """

    def __init__(self, dictionary: Dictionary, mark: str | None) -> None:
        super().__init__(dictionary)
        self.mark = mark
        self._begin_line(maybe_heading=True)

    def add(self, tokens: Iterable[int]) -> str:
        pieces = []
        for token in tokens:
            if token == self.dictionary.eos():
                pieces.append(self._rest() + "\n")
                self._begin_line(maybe_heading=True)
            else:
                self._take(self.dictionary[token])
        return "".join(pieces) + self._new(complete_line=False)

    def pause(self) -> str:
        maybe_heading = bool(self.buffer)
        text = self._rest()
        if maybe_heading:
            self._begin_line(maybe_heading=False)
            self.lead = " "
        return text

    def _begin_line(self, maybe_heading: bool) -> None:
        self.line = Words(self.mark)
        self.buffer: list[str] = []  # symbols of a possible heading
        self.maybe_heading = maybe_heading
        self.shown, self.lead = "", ""

    def _take(self, symbol: str) -> None:
        """Read a symbol; buffer it if its line may be a heading."""
        if not self.maybe_heading:
            self.line.add(symbol)
            return
        self.buffer.append(symbol)
        if self.buffer[0] != "=" or len(self.buffer) > LONGEST_HEADING:
            self._release(self.buffer)

    def _release(self, symbols: Sequence[str]) -> None:
        """Add *symbols*, the buffer without heading markup, to the line and clear the buffer."""
        for symbol in symbols:
            self.line.add(symbol)
        self.buffer, self.maybe_heading = [], False

    def _rest(self) -> str:
        """The rest of the line's text, including the buffered part."""
        if self.buffer:
            self._release(heading(self.buffer))
        return self._new(complete_line=True)

    def _new(self, complete_line: bool) -> str:
        """The text of the line's words since the last call; *complete_line*: up to the last word.

        A final punctuation mark is delayed until the next token, which decides the spaces around it.
        """
        words = self.line.complete
        complete = complete_line or not words or words[-1].isalnum()
        text = detokenize(words if complete else words[:-1])
        if not complete and len(text) < len(self.shown):
            # The last word was returned before, and is not complete yet.
            return ""
        new = self.lead + text[_common(text, self.shown) :] if text else ""
        self.shown, self.lead = text, "" if text else self.lead
        if len(words) > LONGEST_TAIL:
            # What is left has the same open quotes and the same last word, on which the text of the next word depends.
            words[:-1] = shortened(words[:-1])
            self.shown = detokenize(words if complete else words[:-1])
        return new


class Words:
    """Words built from symbols: WikiText's marks inside words removed, subwords joined.

    Attributes:
        complete: the words; the last may be incomplete.
    """

    def __init__(self, mark: str | None = None) -> None:
        self.complete: list[str] = []
        self.mark = mark  # suffix of a subword that is continued by the next one
        self.joined = False

    def add(self, symbol: str) -> None:
        goes_on = self.mark is not None and symbol.endswith(self.mark)
        text = symbol.removesuffix(self.mark) if goes_on and self.mark else JOINTS.get(symbol, symbol)
        if self.complete and (self.joined or symbol in JOINTS):
            self.complete[-1] += text
        else:
            self.complete.append(text)
        self.joined = goes_on or symbol in JOINTS


def heading(words: Sequence[str]) -> Sequence[str]:
    """The title of a heading ``= = Title = =``; other lines unchanged."""
    level = 0
    while 2 * level + 2 < len(words) and words[level] == words[-1 - level] == "=":
        level += 1
    return words[level : len(words) - level]


def detokenize(words: Sequence[str]) -> str:
    """Text of complete words."""
    return str(_detokenizer().detokenize(words, unescape=False)) if words else ""


def shortened(words: Sequence[str]) -> list[str]:
    """A short equivalent of *words* for the detokenizer's state: the open quotes and the last word."""
    words = " ".join(words).split()  # as in the detokenizer
    if not words:
        return []
    is_quote = _detokenizer().IS_OPEN_QUOTE.search
    last, opened = words[-1], list[str]()
    for quote in dict.fromkeys(filter(is_quote, words)):
        if _is_open(quote, words) != _is_open(quote, opened):
            opened.append(quote)
    # It is among the open quotes; what is left to keep is whether the next word is joined to it.
    if is_quote(last):
        last = "," if detokenize([*words, "a"]).endswith(" a") else "("
    return [*opened, last]


def _is_open(quote: str, words: Sequence[str]) -> bool:
    """Return whether *quote* after *words* would be a closing quote, which is followed by a space."""
    return detokenize([*words, "a", quote, "a"]).endswith(" a")


def _common(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    return len(second) if first.startswith(second) else len(os.path.commonprefix([first, second]))


@functools.cache
def _detokenizer() -> Any:
    # Imported at first use: most commands never detokenize.
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang="en")
