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


def writing_of(dictionary: Dictionary, remove_bpe: str | None = None) -> Writing:
    """How texts of *dictionary* are written: in bytes, in characters, or else in words.

    Args:
        remove_bpe: the mark that a subword ends in where its word goes on, ``@@``.
    """
    silent = set(never_written(dictionary)) | {dictionary.eos()}
    symbols = [word for index, word in enumerate(dictionary.symbols) if index not in silent]
    if symbols and BYTES.issuperset(symbols):
        return ByteWriting(dictionary)
    if symbols and all(len(word) == 1 or word in SPACES for word in symbols):
        return CharacterWriting(dictionary)
    return Writing(dictionary, remove_bpe.strip() if remove_bpe else None)


class Writing:
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


class CharacterWriting(Writing):
    """Every symbol is a character; one of :data:`SPACES` stands for a space, or else the end of a line, as in text8."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        line_end = dictionary[dictionary.eos()]
        self.space = next((symbol for symbol in SPACES if symbol in dictionary), line_end)

    def split(self, text: str) -> list[str]:
        return [self.space if character.isspace() else character for character in text]

    def stream(self) -> Stream:
        return CharacterStream(self.dictionary, self.space)


class ByteWriting(Writing):
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

    A line that may be a heading (``= = Title = =``) is held back until it is known whether it is one.
    """

    def __init__(self, dictionary: Dictionary, mark: str | None) -> None:
        super().__init__(dictionary)
        self.mark = mark
        self._begin_line()

    def add(self, tokens: Iterable[int]) -> str:
        pieces = []
        for token in tokens:
            if token == self.dictionary.eos():
                pieces.append(self._new(whole=True) + "\n")
                self._begin_line()
            else:
                self.line.append(self.dictionary[token])
        return "".join(pieces) + self._new(whole=False)

    def pause(self) -> str:
        may_be_heading = self.line[:1] == ["="] and not self.shown
        text = self._new(whole=True)
        if may_be_heading:
            self._begin_line(lead=" ")
        return text

    def _begin_line(self, lead: str = "") -> None:
        self.line: list[str] = []
        self.shown, self.lead = "", lead

    def _new(self, whole: bool) -> str:
        """What can be shown now of the line and was not before; *whole*: nothing more belongs to it.

        A mark is shown when the next token is there, since what it joins decides how it stands.
        """
        may_be_heading = self.line[:1] == ["="] and not self.lead and len(self.line) <= LONGEST_HEADING
        if may_be_heading and not whole:
            return ""
        words = merge(heading(self.line) if may_be_heading else self.line, self.mark)
        if words and not whole and not words[-1].isalnum():
            words.pop()
        text = self.lead + str(_detokenizer().detokenize(words, unescape=False)) if words else ""
        if not whole and not text.startswith(self.shown):
            return ""
        new = text[len(os.path.commonprefix([text, self.shown])) :]
        self.shown = text
        return new


def heading(words: Sequence[str]) -> Sequence[str]:
    """The title of a heading, ``= = Title = =``; other lines as they are."""
    level = 0
    while 2 * level + 2 < len(words) and words[level] == words[-1 - level] == "=":
        level += 1
    return words[level : len(words) - level]


def merge(words: Sequence[str], mark: str | None = None) -> list[str]:
    """Whole words: WikiText's marks inside words undone, and subwords joined.

    Args:
        mark: what a subword ends in where its word goes on.
    """
    whole: list[str] = []
    joined = False
    for word in words:
        goes_on = mark is not None and word.endswith(mark)
        text = word.removesuffix(mark) if goes_on and mark else JOINTS.get(word, word)
        if whole and (joined or word in JOINTS):
            whole[-1] += text
        else:
            whole.append(text)
        joined = goes_on or word in JOINTS
    return whole


@functools.cache
def _detokenizer() -> Any:
    from sacremoses import MosesDetokenizer

    return MosesDetokenizer(lang="en")
