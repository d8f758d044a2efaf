"""Conversion between text and dictionary tokens:
words, characters, bytes, or the symbols of a tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fairseq.text.dictionary import FILLER, Dictionary
from fairseq.text.symbols import BYTES
from fairseq.text.text_corpus import TextReader, log_tokens
from fairseq.text.tokenizers import Tokenizer
from fairseq.text.tokenizers.moses import Moses
from fairseq.text.tokenizers.rules import BeginMarks
from fairseq.text.tokenizers.tokenizer import chosen_rule

SPACES = ("_", "▁", "␣", "<space>")  # symbols for a space in character corpora
LONGEST_HEADING = 40  # words
LONGEST_LINE = 512  # symbols of a line that are decoded again for each token
PROBE = " a ".join([*"\"'`„“”", "''", "``", ""]).split()  # words between quotes
JOINTS = {"@-@": "-", "@,@": ",", "@.@": "."}  # WikiText's marks inside words


def never_written(dictionary: Dictionary) -> list[int]:
    """Indices that never occur in text: special symbols
    other than the end of a line, and fillers."""
    special = {dictionary.bos(), dictionary.pad(), dictionary.unk(), *range(dictionary.nspecial)}
    fillers = {
        index
        for index, (word, count) in enumerate(zip(dictionary.symbols, dictionary.count, strict=True))
        if word.startswith(FILLER) and count == 0
    }
    return sorted(index for index in special | fillers if index >= 0 and index != dictionary.eos())


@dataclass(frozen=True)
class Detokenizer:
    """Conversion between text and the tokens of a dictionary."""

    dictionary: Dictionary
    stream: Callable[[], Stream]  # makes an incremental decoder
    tokenizer: Tokenizer | None = None  # of the data; None: text is words, characters or bytes

    def encode(self, text: str) -> tuple[list[int], list[str]]:
        """The tokens of one line without ``</s>``,
        and its symbols that are not in the dictionary, each time."""
        symbols = list(self.stream().split(text))
        unknown = [symbol for symbol in symbols if symbol not in self.dictionary]
        return [self.dictionary.text_index(symbol) for symbol in symbols], unknown

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of *tokens*; ``</s>`` becomes a line feed."""
        stream = self.stream()
        return stream.add(tokens) + stream.end()


def detokenizer_of(
    dictionary: Dictionary, remove_bpe: str | None = None, tokenizer: Tokenizer | None = None
) -> Detokenizer:
    """The detokenizer for *dictionary*: of the tokenizer of its data, for bytes, for characters, or
    else for words.

    Text of words is read as tokens between white space, which the log tells.

    Args:
        remove_bpe: how subwords are joined, see :func:`chosen_rule`.
        tokenizer: of the data, which joins its subwords; None: there is none.

    Raises:
        UserError: the dictionary has no such subwords.
    """
    rule = None if remove_bpe is None else chosen_rule(remove_bpe, dictionary)
    if tokenizer is not None:
        return Detokenizer(dictionary, lambda: LineStream(dictionary, tokenizer), tokenizer)
    special = set(never_written(dictionary)) | {dictionary.eos()}
    symbols = [word for index, word in enumerate(dictionary.symbols) if index not in special]
    # By the symbols alone: such data hold no tokenizer that would say so.
    if symbols and BYTES.issuperset(symbols):
        return Detokenizer(dictionary, lambda: ByteStream(dictionary))
    if symbols and all(len(word) == 1 or word in SPACES for word in symbols):
        # text8 has no symbol for spaces, which end its lines.
        space = next((symbol for symbol in SPACES if symbol in dictionary), dictionary[dictionary.eos()])
        return Detokenizer(dictionary, lambda: CharacterStream(dictionary, space))
    log_tokens(dictionary)
    if isinstance(rule, BeginMarks):
        return Detokenizer(dictionary, lambda: PieceStream(dictionary, rule.mark))
    return Detokenizer(dictionary, lambda: LineStream(dictionary, mark=None if rule is None else rule.mark))


class Stream:
    """Text of one kind: its symbols, and their incremental decoder,
    whose pieces together are the whole text."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary

    def split(self, text: str) -> Iterable[str]:
        """The symbols of one line, including unknown ones."""
        return text.split()

    def add(self, tokens: Iterable[int]) -> str:
        """Read *tokens*; return the text that later tokens cannot change."""
        eos = self.dictionary.eos()
        pieces = [self._end_line() if token == eos else self._take(self.dictionary[token]) for token in tokens]
        return "".join(pieces) + self._complete()

    def pause(self) -> str:
        """Return buffered text at the end of a prompt; the continuation is shown separately."""
        return ""

    def end(self) -> str:
        """Return buffered text at the end of the text."""
        return self.pause()

    def _take(self, symbol: str) -> str:
        """Read a symbol of the line; return its text, or nothing where it is buffered."""
        raise NotImplementedError

    def _end_line(self) -> str:
        """Return the rest of the line, with its end."""
        raise NotImplementedError

    def _complete(self) -> str:
        """Return buffered text that no further symbol can change."""
        return ""


class CharacterStream(Stream):
    """Characters. A space is the symbol *space*,
    one of :data:`SPACES`, or ``</s>``, as in text8."""

    def __init__(self, dictionary: Dictionary, space: str) -> None:
        super().__init__(dictionary)
        self.space = space

    def split(self, text: str) -> Iterable[str]:
        return (self.space if character.isspace() else character for character in text)

    def _take(self, symbol: str) -> str:
        return " " if symbol == self.space else symbol

    def _end_line(self) -> str:
        return " " if self.dictionary[self.dictionary.eos()] == self.space else "\n"


class ByteStream(Stream):
    """UTF-8 bytes as decimal numbers, as in enwik8; a character is returned with its last byte."""

    def __init__(self, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def split(self, text: str) -> Iterable[str]:
        # Bytes that are not UTF-8 arrive from a command line or a pipe as lone surrogates.
        return map(str, text.encode("utf-8", "surrogateescape"))

    def end(self) -> str:
        return self.decoder.decode(b"", final=True)

    def _take(self, symbol: str) -> str:
        return self.decoder.decode(bytes([int(symbol)]) if symbol in BYTES else symbol.encode())

    def _end_line(self) -> str:
        return self._take("10")


class PieceStream(Stream):
    """Pieces of SentencePiece, in which *mark* is a space; none stands before the first word of a
    line."""

    def __init__(self, dictionary: Dictionary, mark: str) -> None:
        super().__init__(dictionary)
        self.mark, self.is_first = mark, True

    def _take(self, symbol: str) -> str:
        text = symbol.replace(self.mark, " ")
        text = text.removeprefix(" ") if self.is_first else text
        self.is_first = False
        return text

    def _end_line(self) -> str:
        self.is_first = True
        return "\n"


class LineStream(Stream):
    """Running text; the line so far is decoded with each token, and its last word returned once it
    is complete.

    After :data:`LONGEST_LINE` symbols without an end of line, text goes on after a whole word as if
    a line began.

    Args:
        tokenizer: of the data; None: symbols are words, in which WikiText's marks and headings are
            resolved.
        mark: without a tokenizer, suffix of a subword that is continued by the next one.
    """

    def __init__(self, dictionary: Dictionary, tokenizer: Tokenizer | None = None, mark: str | None = None) -> None:
        super().__init__(dictionary)
        self.tokenizer, self.mark = tokenizer, mark
        self._begin([], "", maybe_heading=tokenizer is None)

    def split(self, text: str) -> Iterable[str]:
        if self.tokenizer is None:
            return text.split()
        return TextReader(self.dictionary, self.tokenizer).symbols([text])[0].split()

    def _begin(self, symbols: list[str], lead: str, maybe_heading: bool) -> None:
        self.symbols: list[str] = symbols
        self.lead = lead  # text before the line's own
        self.maybe_heading: bool = maybe_heading  # ``= = Title = =``
        self.shown = 0

    def pause(self) -> str:
        if self.maybe_heading and self.symbols:
            self.symbols, self.maybe_heading = heading(self.symbols), False
        return self._new(self._text())

    def _take(self, symbol: str) -> str:
        self.symbols.append(symbol)
        self.maybe_heading = self.maybe_heading and self.symbols[0] == "=" and len(self.symbols) <= LONGEST_HEADING
        return self._restart() if len(self.symbols) > LONGEST_LINE else ""

    def _end_line(self) -> str:
        rest = self.pause()
        self._begin([], "", maybe_heading=self.tokenizer is None)
        return rest + "\n"

    def _complete(self) -> str:
        # The last word is held back: a further subword may join it, and a detokeniser attaches
        # punctuation to it.
        return "" if self.maybe_heading else self._new(self._text().rstrip().rpartition(" ")[0])

    def _text(self) -> str:
        return self.lead + self._decode(self.symbols)

    def _decode(self, symbols: list[str]) -> str:
        return detokenize(words_of(symbols, self.mark)) if self.tokenizer is None else self.tokenizer.decode(symbols)

    def _new(self, text: str) -> str:
        """The part of the line's *text* that was not returned yet."""
        new = text[self.shown :]
        # What was returned is not taken back if the line, decoded anew, is shorter.
        self.shown = max(self.shown, len(text))
        return new

    def _restart(self) -> str:
        """Begin a line with the last symbol, if its text is that of a line of its own; return the
        text before it."""
        *before, last = self.symbols
        # Words are joined to quotes by those before them: quotes behind the last word show whether
        # one is open. Some are never closed.
        probe = PROBE if self.tokenizer is None and len(self.symbols) < 4 * LONGEST_LINE else []
        text, own = self._decode(before), self._decode([last, *probe])
        for lead in ("", " "):
            # Before a letter or digit: what follows it does not depend on what is cut off.
            if own.strip()[:1].isalnum() and self._decode([*self.symbols, *probe]) == text + lead + own:
                self.symbols = before
                done = self.pause()
                self._begin([last], lead, maybe_heading=False)
                return done
        return ""


detokenize = Moses().join  # text of complete words


def words_of(symbols: Iterable[str], mark: str | None = None) -> list[str]:
    """Words of symbols: WikiText's marks inside words removed, subwords that end in *mark* joined
    to the next one."""
    words, joins = list[str](), False
    for symbol in symbols:
        goes_on = mark is not None and symbol.endswith(mark)
        text = symbol.removesuffix(mark) if goes_on and mark else JOINTS.get(symbol, symbol)
        if words and (joins or symbol in JOINTS):
            words[-1] += text
        else:
            words.append(text)
        joins = goes_on or symbol in JOINTS
    return words


def heading(symbols: list[str]) -> list[str]:
    """The title of a heading ``= = Title = =``; other lines unchanged."""
    level = 0
    while 2 * level + 2 < len(symbols) and symbols[level] == symbols[-1 - level] == "=":
        level += 1
    return symbols[level : len(symbols) - level]
