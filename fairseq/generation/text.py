"""Running text ⇄ a dictionary's tokens: words between spaces, characters, or the numbers of bytes."""

from __future__ import annotations

import codecs
import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any

from fairseq.data.dictionary import Dictionary

SPACES = ("_", "▁", "␣", "<space>")  # what a corpus of characters writes for a space
BYTES = frozenset(map(str, range(256)))
LONGEST_HEADING = 40  # words
LONGEST_TAIL = 64  # words of a line that are put together again for each token
JOINTS = {"@-@": "-", "@,@": ",", "@.@": "."}  # WikiText's marks between parts of one word


def never_written(dictionary: Dictionary) -> list[int]:
    """The symbols that no text has: padding, the unknown word and the like, fillers; not the end of a line."""
    special = {dictionary.bos(), dictionary.pad(), dictionary.unk(), *range(dictionary.nspecial)}
    fillers = {
        index
        for index, (word, count) in enumerate(zip(dictionary.symbols, dictionary.count, strict=True))
        if word.startswith("madeupword") and count == 0
    }
    return sorted(index for index in special | fillers if index >= 0 and index != dictionary.eos())


def detokenizer_of(dictionary: Dictionary, remove_bpe: str | None = None) -> Detokenizer:
    """How texts of *dictionary* are written: in bytes, in characters, or else in words.

    Args:
        remove_bpe: the mark that a subword ends in where its word goes on, ``@@``.
    """
    silent = set(never_written(dictionary)) | {dictionary.eos()}
    symbols = [word for index, word in enumerate(dictionary.symbols) if index not in silent]
    if symbols and BYTES.issuperset(symbols):
        return ByteDetokenizer(dictionary)
    if symbols and all(len(word) == 1 or word in SPACES for word in symbols):
        return CharacterDetokenizer(dictionary)
    return Detokenizer(dictionary, remove_bpe.strip() if remove_bpe else None)


class Detokenizer:
    """Words between white space; sacremoses puts them together, and headings and WikiText's marks are undone.

    Args:
        dictionary: of the tokens.
        mark: what a subword ends in where its word goes on.
    """

    def __init__(self, dictionary: Dictionary, mark: str | None = None) -> None:
        self.dictionary = dictionary
        self.mark = mark

    def split(self, text: str) -> list[str]:
        """The symbols of one line, known or not."""
        return text.split()

    def encode(self, text: str) -> tuple[list[int], list[str]]:
        """The tokens of one line, without its end, and the symbols that the dictionary does not have."""
        symbols = self.split(text)
        unknown = [symbol for symbol in symbols if symbol not in self.dictionary]
        return [self.dictionary.index(symbol) for symbol in symbols], unknown

    def stream(self) -> Stream:
        """Running text from tokens, as they come."""
        return WordStream(self.dictionary, self.mark)

    def decode(self, tokens: Iterable[int]) -> str:
        """Running text of a whole text's tokens; the end of a line is a line feed."""
        stream = self.stream()
        return stream.add(tokens) + stream.end()


class CharacterDetokenizer(Detokenizer):
    """Every symbol is a character; one of :data:`SPACES` stands for a space, or else the end of a line, as in text8."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        line_end = dictionary[dictionary.eos()]
        self.space = next((symbol for symbol in SPACES if symbol in dictionary), line_end)

    def split(self, text: str) -> list[str]:
        return [self.space if character.isspace() else character for character in text]

    def stream(self) -> Stream:
        return CharacterStream(self.dictionary, self.space)


class ByteDetokenizer(Detokenizer):
    """Every symbol is the number of a byte of UTF-8, as in enwik8; the end of a line is byte 10."""

    def split(self, text: str) -> list[str]:
        return [str(byte) for byte in text.encode("utf-8", "surrogateescape")]

    def stream(self) -> Stream:
        return ByteStream(self.dictionary)


class Stream:
    """Makes running text of tokens, piece by piece: the pieces together are the text of all tokens."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary

    def add(self, tokens: Iterable[int]) -> str:
        """The text that *tokens* add, as far as it is certain."""
        raise NotImplementedError

    def pause(self) -> str:
        """What was held back: a prompt ends here, what follows is shown apart."""
        return ""

    def end(self) -> str:
        """What was held back, at the end of the text."""
        return self.pause()


class CharacterStream(Stream):
    """One character a token."""

    def __init__(self, dictionary: Dictionary, space: str) -> None:
        super().__init__(dictionary)
        self.special = {dictionary.eos(): "\n"} | {dictionary.index(space): " "}

    def add(self, tokens: Iterable[int]) -> str:
        return "".join(self.special.get(token, self.dictionary[token]) for token in tokens)


class ByteStream(Stream):
    """One byte a token; a character is shown when its last byte is there."""

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
    """Words, put together by sacremoses. What a word looks like depends on those before it in its line alone.

    Of a line's words only the last are held; what those before them decide is kept as a few words (:func:`shortened`),
    so that a token costs the same however long its line is. A line that may be a heading (``= = Title = =``) is held
    back until it is known whether it is one.
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
        return "".join(pieces) + self._new(whole=False)

    def pause(self) -> str:
        maybe_heading = bool(self.held)
        text = self._rest()
        if maybe_heading:
            self._begin_line(maybe_heading=False)
            self.lead = " "
        return text

    def _begin_line(self, maybe_heading: bool) -> None:
        self.line = Words(self.mark)
        self.held: list[str] = []  # symbols of what may be a heading
        self.maybe_heading = maybe_heading
        self.shown, self.lead = "", ""

    def _take(self, symbol: str) -> None:
        """Read a symbol: hold it, if its line may be a heading."""
        if not self.maybe_heading:
            self.line.add(symbol)
            return
        self.held.append(symbol)
        if self.held[0] != "=" or len(self.held) > LONGEST_HEADING:
            self._release(self.held)

    def _release(self, symbols: Sequence[str]) -> None:
        """Read what was held: *symbols* are what is left of it."""
        for symbol in symbols:
            self.line.add(symbol)
        self.held, self.maybe_heading = [], False

    def _rest(self) -> str:
        """What was not shown of the line: nothing more belongs to it, or it is to be seen now."""
        if self.held:
            self._release(heading(self.held))
        return self._new(whole=True)

    def _new(self, whole: bool) -> str:
        """What can be shown now of the line's words and was not before; *whole*: all of them.

        A mark is shown when the next token is there, since what it joins decides how it stands.
        """
        words = self.line.whole
        complete = whole or not words or words[-1].isalnum()
        text = detokenize(words if complete else words[:-1])
        if not complete and len(text) < len(self.shown):
            return ""  # the last word was shown and goes on
        new = self.lead + text[_common(text, self.shown) :] if text else ""
        self.shown, self.lead = text, "" if text else self.lead
        if len(words) > LONGEST_TAIL:
            words[:-1] = shortened(words[:-1])
            self.shown = detokenize(words if complete else words[:-1])
        return new


class Words:
    """Whole words of symbols that come one by one: WikiText's marks inside words undone, and subwords joined.

    Attributes:
        whole: the words; the last may go on.
    """

    def __init__(self, mark: str | None = None) -> None:
        self.whole: list[str] = []
        self.mark = mark  # what a subword ends in where its word goes on
        self.joined = False

    def add(self, symbol: str) -> None:
        goes_on = self.mark is not None and symbol.endswith(self.mark)
        text = symbol.removesuffix(self.mark) if goes_on and self.mark else JOINTS.get(symbol, symbol)
        if self.whole and (self.joined or symbol in JOINTS):
            self.whole[-1] += text
        else:
            self.whole.append(text)
        self.joined = goes_on or symbol in JOINTS


def heading(words: Sequence[str]) -> Sequence[str]:
    """The title of a heading, ``= = Title = =``; other lines as they are."""
    level = 0
    while 2 * level + 2 < len(words) and words[level] == words[-1 - level] == "=":
        level += 1
    return words[level : len(words) - level]


def detokenize(words: Sequence[str]) -> str:
    """Running text of whole words."""
    return str(_detokenizer().detokenize(words, unescape=False)) if words else ""


def shortened(words: Sequence[str]) -> list[str]:
    """A few words after which the detokenizer goes on as after *words*: the quotes that are open, and the last word."""
    words = " ".join(words).split()  # as the detokenizer does
    if not words:
        return []
    is_quote = _detokenizer().IS_OPEN_QUOTE.search
    last, opened = words[-1], list[str]()
    for quote in dict.fromkeys(filter(is_quote, words)):
        if _is_open(quote, words) != _is_open(quote, opened):
            opened.append(quote)
    if is_quote(last):  # it counts already; what remains is whether the next word joins it
        last = "," if detokenize([*words, "a"]).endswith(" a") else "("
    return [*opened, last]


def _is_open(quote: str, words: Sequence[str]) -> bool:
    """Whether *quote* after *words* would close: it then stands apart from what follows."""
    return detokenize([*words, "a", quote, "a"]).endswith(" a")


def _common(first: str, second: str) -> int:
    """How many characters two texts have in common at their start."""
    return len(second) if first.startswith(second) else len(os.path.commonprefix([first, second]))


@functools.cache
def _detokenizer() -> Any:
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang="en")
