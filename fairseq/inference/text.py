"""Conversion between text and dictionary tokens:
words, characters, bytes, or the symbols of a tokenizer."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterable, Sequence
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
LONGEST_LINE = 512  # symbols of a line that a tokenizer decodes again for each token
LONGEST_TAIL = 64  # words of a line that are detokenized again for each token
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
    return Detokenizer(dictionary, lambda: WordStream(dictionary, rule.mark if rule is not None else None))


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
    """Raw text; the line so far is decoded with each token,
    and its last word returned once it is complete.

    After :data:`LONGEST_LINE` symbols without an end of line, text goes on after a whole word as if
    a line began.
    """

    def __init__(self, dictionary: Dictionary, tokenizer: Tokenizer) -> None:
        super().__init__(dictionary)
        self.tokenizer = tokenizer
        self._begin("")

    def split(self, text: str) -> Iterable[str]:
        return TextReader(self.dictionary, self.tokenizer).symbols([text])[0].split()

    def pause(self) -> str:
        return self._new(self._text())

    def _begin(self, lead: str) -> None:
        self.symbols: list[str] = []
        self.lead = lead  # text before the line's own
        self.shown = 0

    def _take(self, symbol: str) -> str:
        self.symbols.append(symbol)
        return self._restart() if len(self.symbols) > LONGEST_LINE else ""

    def _end_line(self) -> str:
        rest = self.pause()
        self._begin("")
        return rest + "\n"

    def _complete(self) -> str:
        # The last word is held back: a further subword may join it, and a detokeniser attaches
        # punctuation to it.
        return self._new(self._text().rstrip().rpartition(" ")[0])

    def _text(self) -> str:
        return self.lead + self.tokenizer.decode(self.symbols)

    def _new(self, text: str) -> str:
        """The part of the line's *text* that was not returned yet."""
        new = text[self.shown :]
        # What was returned is not taken back if the line, decoded anew, is shorter.
        self.shown = max(self.shown, len(text))
        return new

    def _restart(self) -> str:
        """Return the text of all words but the last, which begins a line, if that is a word with a
        space before it."""
        # Before a word that begins with a letter or digit: the text of what is left does not depend
        # on what is cut off.
        words, sizes = self.tokenizer.rule.group(self.symbols)
        if len(words) < 2 or not words[-1][:1].isalnum():
            return ""
        last, before = self.symbols[-sizes[-1] :], self.symbols[: -sizes[-1]]
        self.symbols = before
        done = self.pause()
        self._begin(self.tokenizer.glue)
        self.symbols = last
        return done


class WordStream(Stream):
    """Words between white space, detokenized with sacremoses;
    heading markup and WikiText's marks are removed.

    A word's text depends only on the words before it in its line.

    Only the last words of a line are kept; :func:`shortened` summarises the earlier ones, so that
    the cost of a token does not grow with the length of its line. A line that may be a heading
    (``= = Title = =``) is buffered until it ends or turns out not to be one.

    Args:
        mark: suffix of a subword that is continued by the next one.
    """

    def __init__(self, dictionary: Dictionary, mark: str | None) -> None:
        super().__init__(dictionary)
        self.mark = mark
        self._begin_line(maybe_heading=True)

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

    def _take(self, symbol: str) -> str:
        if self.maybe_heading:
            self.buffer.append(symbol)
            if self.buffer[0] != "=" or len(self.buffer) > LONGEST_HEADING:
                self._release(self.buffer)
        else:
            self.line.add(symbol)
        return ""

    def _end_line(self) -> str:
        rest = self._rest()
        self._begin_line(maybe_heading=True)
        return rest + "\n"

    def _complete(self) -> str:
        return self._new(complete_line=False)

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

        A final punctuation mark is delayed until the next token,
        which decides the spaces around it.
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
            # What is left has the same open quotes and the same last word, on which the text of the
            # next word depends.
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


detokenize = Moses().join  # text of complete words


def shortened(words: Sequence[str]) -> list[str]:
    """A short equivalent of *words* for the detokenizer's
    state: the open quotes and the last word."""
    # Imported at first use: most commands never detokenize.
    from sacremoses import MosesDetokenizer

    words = " ".join(words).split()  # as in the detokenizer
    if not words:
        return []
    is_quote = MosesDetokenizer.IS_OPEN_QUOTE.search
    last, opened = words[-1], list[str]()
    for quote in dict.fromkeys(filter(is_quote, words)):
        if _is_open(quote, words) != _is_open(quote, opened):
            opened.append(quote)
    # It is among the open quotes; what is left to keep is whether the next word is joined to it.
    if is_quote(last):
        last = "," if detokenize([*words, "a"]).endswith(" a") else "("
    return [*opened, last]


def _is_open(quote: str, words: Sequence[str]) -> bool:
    """Return whether *quote* after *words* would be
    a closing quote, which is followed by a space."""
    return detokenize([*words, "a", quote, "a"]).endswith(" a")


def _common(first: str, second: str) -> int:
    """Length of the common prefix of two texts."""
    return len(second) if first.startswith(second) else len(os.path.commonprefix([first, second]))
