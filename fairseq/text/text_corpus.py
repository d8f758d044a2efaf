"""Text as a corpus in memory, encoded by the tokenizer of the data or split at white space."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fairseq.text.dictionary import Dictionary
from fairseq.text.raw_text import (
    STDIN,
    Block,
    RawCounts,
    TextFormat,
    blocks_of,
    check_raw,
    documents_of,
    lines_of,
    no_words,
    read_blocks,
)
from fairseq.text.tokenizers import Subwords, Tokenizer, find_tokenizer
from fairseq.text.tokenizers.base import Space, Span
from fairseq.text.tokenizers.rules import LINE_END

logger = logging.getLogger(__name__)

MOST_NAMED = 10  # unknown symbols in a message


@dataclass(frozen=True)
class TextCorpus:
    """Tokens of a text."""

    tokens: np.ndarray  # int32 [N], ``</s>`` at the end of each line
    sizes: np.ndarray  # int32 [lines]
    counts: RawCounts | None = None  # size of the raw text; None where the text was tokens already
    texts: Sequence[str] | None = None  # of each line, where :meth:`TextReader.documents` was given them

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """Tokens before each line, and at the end all: int64 [lines + 1]."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])


def report_unknown(tokens: Iterable[int], dictionary: Dictionary, symbols: Iterable[str]) -> None:
    """Log the share of *tokens* that are the unknown symbol,
    if any, and *symbols* that *dictionary* lacks."""
    counts = Counter(tokens)
    # Ends of lines are always known and would make the share look smaller.
    unknown, total = counts[dictionary.unk()], counts.total() - counts[dictionary.eos()]
    if unknown:
        names = list(dict.fromkeys(symbols))
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        names_text = f", not in the dictionary: {' '.join(names[:MOST_NAMED])}{more}" if names else ""
        logger.warning("%.3g %% of %d tokens are read as <unk>%s", 100 * unknown / total, total, names_text)


def log_tokens(dictionary: Dictionary) -> None:
    """Log that text is read as tokens."""
    path = dictionary.path or "the dictionary"
    logger.info("no tokenizer next to %s: text is read as tokens between white space", path)


@dataclass(frozen=True)
class TextReader:
    """Reader of text for a model: raw text where its data
    has a *tokenizer*, else tokens between white space."""

    dictionary: Dictionary
    tokenizer: Tokenizer | None = None

    def __call__(self, line: str) -> np.ndarray:
        """Return the ids of one line of text, without special symbols: int32 [tokens]."""
        return self.dictionary.encode(self.symbols([line])[0], append_eos=False)

    @classmethod
    def of(cls, data: str | Path, dictionary: Dictionary) -> TextReader:
        """Return the reader with the tokenizer next to the dictionary of *data*.

        Raises:
            UserError: the tokenizer is damaged or belongs to another dictionary.
        """
        return cls(dictionary, find_tokenizer(dictionary.path or data, dictionary.symbols))

    @property
    def keeps_lines(self) -> bool:
        """Whether a text is read with its line feeds; else they are ``</s>``, as at the end of
        every line."""
        return self._library is not None

    @property
    def _library(self) -> Subwords | None:
        """The encoding that reads and writes a text as it is: that of a model from elsewhere.

        It decides what a line feed is, a symbol as in GPT-2 and Llama or white space as in BERT,
        and what ``<unk>`` is. An encoding that was made here may have symbols for line feeds, too,
        but its corpora are lines: no model has seen them.
        """
        steps = self.tokenizer
        if steps is None or steps.words is not None or steps.subwords is None or self.dictionary.nspecial:
            return None
        return steps.subwords if steps.subwords.reads_lines else None

    def symbols(self, lines: Sequence[str]) -> Sequence[str]:
        """Return the symbols of each of *lines*, separated by white space."""
        if self._library is not None:
            return self._library.encode(lines)
        return lines if self.tokenizer is None else self.tokenizer.encode_lines(lines)

    def ids(self, text: str) -> list[int]:
        """Return the ids of *text*, with what stands between
        its lines, and without ``</s>`` at the end."""
        return self.rows([text])[0]

    def rows(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the ids of each of *texts*, as :meth:`ids` does."""
        lines = [[text] if self.keeps_lines else LINE_END.split(text) for text in texts]
        # All at once: a call of a library costs more than a line.
        symbols = iter(self.symbols(list(itertools.chain(*lines))))
        return [self._joined(list(itertools.islice(symbols, len(of_text)))) for of_text in lines]

    def ids_around(self, text: str, mask: str) -> tuple[list[int], int]:
        """Return the ids of *text*, which has the symbol *mask* once, and the index of its id."""
        index = self.dictionary.index(mask)
        if self.keeps_lines and (ids := self.ids(text)).count(index) == 1:
            return ids, ids.index(index)
        # The space before a word belongs to its first symbol, where symbols hold spaces at all.
        start, rest = text.split(mask)
        before = self.ids(start.rstrip())
        first, *lines = [rest] if self.keeps_lines else LINE_END.split(rest)
        if self.tokenizer is not None and not self.keeps_lines:
            first = " ".join(span.symbol for span in self.tokenizer.spans_after(first))
        else:
            [first] = self.symbols([first])
        return [*before, index, *self._joined([first, *self.symbols(lines)])], len(before)

    def _joined(self, lines: Sequence[str]) -> list[int]:
        """The ids of *lines* of symbols, with ``</s>`` between them."""
        ids: list[int] = []
        for number, line in enumerate(lines):
            ids += [self.dictionary.eos()] * (number > 0) + self.dictionary.encode(line, append_eos=False).tolist()
        return ids

    def spans(self, line: str) -> list[Span]:
        """Return the symbols of one line with the text that each stands for."""
        steps = self._library or self.tokenizer
        return Space().spans(line) if steps is None else steps.spans(line)

    def corpus(self, text: str) -> TextCorpus:
        """Return the tokens of *text*, whose lines end as in Python's text files."""
        return self._corpus([(self.lines(text), False)])

    def documents(self, texts: Sequence[str]) -> TextCorpus:
        """Return a corpus with one line for each of *texts*; there must be at least one."""
        lines = [self.lines(text) for text in texts]
        corpus = self._corpus([(list(itertools.chain(*lines)), False)])
        starts = np.cumsum([0, *map(len, lines[:-1])])
        return dataclasses.replace(corpus, sizes=np.add.reduceat(corpus.sizes, starts), texts=texts)

    def lines(self, text: str) -> list[str]:
        """Return the lines of *text*, each of which is read with its ``</s>``."""
        lines = [text] if self.keeps_lines else LINE_END.split(text)
        if len(lines) > 1 and not lines[-1]:
            lines.pop()  # end of the last line
        return lines

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of *tokens*; the symbol at the end of a line is a line feed."""
        lines: list[list[str]] = [[]]
        for token in tokens:
            if token == self.dictionary.eos():
                lines.append([])
            else:
                lines[-1].append(self.dictionary[token])
        decoder = self._library or self.tokenizer
        join = " ".join if decoder is None else decoder.decode
        return "\n".join(join(line) for line in lines)

    def texts(self, path: str, form: TextFormat) -> list[str]:
        """Return the documents of a file, ``-`` for stdin: its rows, or else its lines.

        Raises:
            UserError: the file cannot be read or has no words.
        """
        texts: list[str] = []
        goes_on = False
        for block in _blocks(path, form):
            if form.field is not None:
                # The end of the last line: blank lines before it are lines, too.
                end = "" if self.keeps_lines else "\n"
                texts += ["\n".join(lines) + end for lines in documents_of(block, form)]
            else:
                lines = lines_of(block, form)
                if goes_on and lines:
                    texts[-1] += " " * form.join_lines + lines.pop(0)
                texts += lines
                goes_on = block.unfinished
        if not any(map(str.strip, texts)):
            raise no_words(path)
        return texts

    def read(self, path: str, form: TextFormat, lines_apart: bool = False) -> TextCorpus:
        """Return the tokens of a text, ``-`` for stdin;
        UserError if it cannot be read or has no words.

        Where line feeds are symbols, a row or else the whole text is one line, unless with
        *lines_apart* each line is of its own.
        """
        pieces: list[str] = []  # parts of a text that is one line

        def lines() -> Iterator[tuple[list[str], bool]]:
            for block in _blocks(path, form):
                if form.field is not None and self.keeps_lines:
                    yield ["\n".join(parts) for parts in documents_of(block, form)], False
                elif form.field is None and self.keeps_lines and not lines_apart:
                    pieces.extend(("\n".join(lines_of(block, form)), "" if block.unfinished else "\n"))
                else:
                    yield lines_of(block, form), block.unfinished
            if pieces:
                yield ["".join(pieces).removesuffix("\n")], False

        corpus = self._corpus(lines())
        if len(corpus.tokens) == len(corpus.sizes) or (corpus.counts is not None and not corpus.counts.words):
            raise no_words(path)
        return corpus

    def _corpus(self, blocks: Iterable[tuple[Sequence[str], bool]]) -> TextCorpus:
        """The tokens of the lines in *blocks*, each
        with whether its last line goes on in the next one."""
        parts: list[np.ndarray] = []  # of lines
        begins: list[int] = []  # the number of each line's first part
        unknown: dict[str, None] = {}
        counts = RawCounts()
        goes_on = False
        for lines, unfinished in blocks:
            counts += RawCounts.of(lines, unfinished)
            for number, line in enumerate(self.symbols(lines), 1):
                begins += [] if goes_on else [len(parts)]
                goes_on = unfinished and number == len(lines)
                parts.append(self.dictionary.encode(line, append_eos=not goes_on))
                # Not a set: the first ones in the text are named.
                unknown |= dict.fromkeys(symbol for symbol in line.split() if symbol not in self.dictionary)
        tokens = np.concatenate([np.empty(0, np.int32), *parts])
        lengths = np.array([len(part) for part in parts], np.int32)
        sizes = np.add.reduceat(lengths, np.array(begins, np.int64)).astype(np.int32)
        corpus = TextCorpus(tokens, sizes, counts if self.tokenizer is not None else None)
        report_unknown(corpus.tokens.tolist(), self.dictionary, unknown)
        return corpus


def _blocks(path: str, form: TextFormat) -> Iterator[Block]:
    if path == STDIN:
        return blocks_of("stdin", sys.stdin.buffer, form)
    check_raw(path)
    return read_blocks(path, form)
