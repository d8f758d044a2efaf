"""Surprisal of words: −log₂ of their probability, in bits, summed over their tokens."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fairseq.errors import UserError, counted
from fairseq.evaluation.scorer import Scores
from fairseq.text.text_corpus import TextReader
from fairseq.text.tokenizers.rules import LINE_END

logger = logging.getLogger(__name__)

WORD = re.compile(r"\S+")
HEADING = ("document", "word", "start", "end", "surprisal", "tokens")


class WordSurprisal(NamedTuple):
    """A word between white space, or the end of a line, and how surprising it was."""

    word: str  # with its punctuation; ``</s>`` at the end of a line
    start: int  # its characters in the text are start … end − 1
    end: int
    surprisal: float  # bits
    tokens: int  # whose surprisals were added


def warn_of_blocks(lengths: np.ndarray, longest: int, memory_length: int) -> None:
    """Warn of texts with more tokens than a model without memory reads at once."""
    if (cut := int((lengths > longest).sum())) and not memory_length:
        logger.warning(
            "%s of more than %d tokens: read in blocks, whose first words have no context; see `context_window`",
            counted(cut, "text"),
            longest,
        )


def surprisals(reader: TextReader, texts: Sequence[str], scores: Scores) -> Iterator[list[WordSurprisal]]:
    """Yield the words of each of *texts* with their surprisal; *scores* are of
    ``reader.documents(texts)``.

    A token belongs to the first word that ends after the token's start: white space before a word
    belongs to that word. ``</s>``, and white space before it, is a row of its own, so that rows add
    up to the surprisal of the text.

    Raises:
        UserError: *scores* lack some of the tokens.
    """
    # In float64: sums over a text keep their digits.
    bits, first = -scores.lprobs.astype(np.float64) / np.log(2), 0
    for number, text in enumerate(texts, 1):
        rows: list[WordSurprisal] = []
        starts = (0, *(match.end() for match in LINE_END.finditer(text)))
        for offset, line in zip(starts, reader.lines(text), strict=False):  # a line feed at the end begins no line
            words = [match.span() for match in WORD.finditer(line)]
            symbols = [span.start for span in reader.spans(line)]
            last = first + len(symbols)  # the end of the line
            if last >= len(scores) or scores.tokens[last] != reader.dictionary.eos():
                raise UserError(f"text {number}: not all of its tokens were scored; leave out what drops blocks")
            owner = np.searchsorted([end for _, end in words], [*symbols, len(line)], side="right")
            sums = np.bincount(owner, bits[first : last + 1], minlength=len(words) + 1).tolist()
            counts = np.bincount(owner, minlength=len(words) + 1).tolist()
            words.append((len(line), len(line)))
            names = [*(line[start:end] for start, end in words[:-1]), reader.dictionary[reader.dictionary.eos()]]
            for name, (start, end), total, count in zip(names, words, sums, counts, strict=True):
                rows.append(WordSurprisal(name, offset + start, offset + end, total, count))
            first = last + 1
        yield rows


def table(documents: Iterable[Sequence[WordSurprisal]]) -> Iterator[bytes]:
    """Yield the lines of a table with tabs, in which words with quotation marks are quoted, as
    spreadsheets read them; documents are numbered from 1."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, "excel-tab", lineterminator="\n")
    writer.writerow(HEADING)
    for number, rows in enumerate(documents, 1):
        writer.writerows((number, *row._replace(surprisal=f"{row.surprisal:.6f}")) for row in rows)  # type: ignore[arg-type]
        yield buffer.getvalue().encode()
        buffer.seek(0)
        buffer.truncate()
