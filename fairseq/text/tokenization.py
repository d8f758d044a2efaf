"""Tokenisation of files in several processes; the same output for any number of them.

``fairseq-preprocess`` cuts raw text into blocks whose size does not depend on the number of
processes, tokenises them into a temporary file, and counts and binarises that.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from fairseq.config.command_settings import TextFormatConfig
from fairseq.errors import UserError
from fairseq.system import checksums
from fairseq.system.files import atomic_file
from fairseq.system.opening import read_named
from fairseq.system.terminal import byte_bar
from fairseq.system.workers import Workers
from fairseq.text.counting import count_words
from fairseq.text.raw_text import (
    BLOCK_BYTES,
    Block,
    RawCounts,
    TextFormat,
    blocks_of,
    check_raw,
    format_of,
    is_plain,
    lines_of,
    no_words,
    read_blocks,
)
from fairseq.text.tokenizers import Subwords, Tokenizer, WordTokenizer

LEARNED = "`learn_bpe`"  # source of codes that were learned on the training text
FEWEST_KNOWN = 0.5  # share of a text's characters that its codes must know


@dataclass(frozen=True)
class TokenizedText:
    """A text of a split."""

    source: str  # the file that the user named
    path: str  # its symbols, separated by white space; the source itself if that holds symbols
    counts: RawCounts | None = None  # size of the raw text; None if the source holds symbols


def useful_workers(workers: int, sources: Iterable[str] | None) -> int:
    """Return *workers*, but at most one for each core and MiB of text: others cost their start and
    find nothing to do. None stands for stdin, of unknown size."""
    workers = min(workers, os.cpu_count() or 1)
    return workers if sources is None else max(1, min(workers, sum(map(check_raw, sources)) // BLOCK_BYTES))


@contextlib.contextmanager
def tokenized_texts(
    splits: Mapping[str, str], tokenizer: Tokenizer | None, form: TextFormatConfig, workers: int, folder: str | Path
) -> Iterator[dict[str, TokenizedText]]:
    """Tokenise the text of each split into temporary
    files of *folder*, which are removed at the end.

    Without a tokenizer, plain text is symbols and is left where it is. See :func:`tokenize_file`.
    """
    texts = {}
    with tempfile.TemporaryDirectory(dir=folder) as temporary, Workers(TokenizeBlock(tokenizer), workers) as pool:
        for name, source in splits.items():
            if tokenizer is None and is_plain(source) and not form.join_lines:
                texts[name] = TokenizedText(source, source)
                continue
            path = os.path.join(temporary, name)
            with open(path, "wb") as file:
                counts = tokenize_file(source, format_of(source, form.text_field, form.join_lines), pool, file)
            texts[name] = TokenizedText(source, path, counts if tokenizer is not None else None)
        yield texts


def learn_subwords(
    kind: type[Subwords],
    size: int,
    words: WordTokenizer | None,
    sources: Sequence[str],
    form: TextFormatConfig,
    workers: int,
    folder: str | Path,
) -> Subwords:
    """Learn *size* merges, pieces or symbols of the words
    of *sources*; temporary files are made in *folder*.

    Raises:
        UserError: see :func:`tokenize_file`; or nothing can be learned.
    """
    tokenizer = Tokenizer(words=words) if words is not None else None
    # Byte-level symbols hold the space before a word, so that counts of words without their spaces
    # do not suffice.
    if kind.learns_lines:
        lines = (batch for source in sources for batch in _batches(source, form, tokenizer))
        return kind(kind.learn_lines(lines, size), LEARNED)
    splits = {str(number): source for number, source in enumerate(sources)}
    with tokenized_texts(splits, tokenizer, form, workers, folder) as texts:
        counts = count_words([text.path for text in texts.values()], workers)
    return kind(kind.learn(counts, size), LEARNED)


def _batches(source: str, form: TextFormatConfig, tokenizer: Tokenizer | None) -> Iterator[list[str]]:
    """The lines of each block of a text, tokenised, with a progress bar."""
    source_form = format_of(source, form.text_field, form.join_lines)
    with byte_bar(check_raw(source), f"learning from {os.path.basename(source)}") as report:
        for block in read_blocks(source, source_form, report):
            lines = lines_of(block, source_form)
            yield lines if tokenizer is None else tokenizer.encode_lines(lines)


@dataclass(frozen=True)
class TokenizeBlock:
    """Tokenises a block: bytes of its lines, each with symbols separated by spaces, and the size of
    what is read."""

    tokenizer: Tokenizer | None  # None leaves lines as they are
    undo: bool = False  # make text of lines of symbols

    def __call__(self, block: Block, form: TextFormat) -> tuple[bytes, RawCounts]:
        lines, tokenizer = lines_of(block, form), self.tokenizer
        # The first block is enough to tell an alphabet,
        # and is the same for any number of processes.
        if block.first == 1 and not self.undo:
            check_alphabet(tokenizer, lines)
        result = lines
        if tokenizer is not None:
            result = [tokenizer.decode(line.split()) for line in lines] if self.undo else tokenizer.encode_lines(lines)
        # The next block may go on with the last line: its symbols are separated by a space, too.
        between = tokenizer.glue if tokenizer is not None and self.undo else " "
        end = between if block.unfinished else "\n"
        return ("\n".join(result) + end * bool(result)).encode(), RawCounts.of(lines, block.unfinished)


def tokenize_stream(file: BinaryIO, form: TextFormat, workers: Workers[tuple[bytes, RawCounts]], out: BinaryIO) -> None:
    """Write the result for each line of an open file to *out*; see :func:`tokenize_file`."""
    for text, _ in workers.map((block, form) for block in blocks_of("stdin", file, form)):
        out.write(text)


def tokenize_file(path: str, form: TextFormat, workers: Workers[tuple[bytes, RawCounts]], out: BinaryIO) -> RawCounts:
    """Write the symbols of each line of a text to *out*, with a progress bar; return the size of
    the raw text.

    Raises:
        UserError: the text cannot be read, has no words or is not UTF-8.
    """
    total = RawCounts()
    with byte_bar(check_raw(path), f"tokenising {os.path.basename(path)}") as report:
        for text, counts in workers.map((block, form) for block in read_blocks(path, form, report)):
            out.write(text)
            total += counts
    if not total.words:
        raise no_words(path)
    return total


def check_alphabet(tokenizer: Tokenizer | None, lines: Sequence[str]) -> None:
    """Raise UserError if codes that were not learned in this run know fewer than half of the
    characters of *lines*."""
    subwords = tokenizer.subwords if tokenizer is not None else None
    text = " ".join(lines)[:10_000]
    # Learned on this very text, they know it.
    if subwords is None or subwords.source == LEARNED or not text.strip():
        return
    known = subwords.knows(text)
    if known < FEWEST_KNOWN:
        raise UserError(
            f"{subwords.source or '`bpe_codes`'}: learned on another alphabet, with {100 * known:.0f} % of the text; "
            "use codes of such text, or `learn_bpe`"
        )


def save_counts(prefix: str | Path, counts: RawCounts) -> None:
    """Write the size of a split's raw text to ``PREFIX.raw.json``."""
    with atomic_file(f"{prefix}.raw.json") as file:
        file.write(json.dumps(asdict(counts)).encode() + b"\n")


def load_counts(prefix: str | Path) -> RawCounts | None:
    """Return the size of a split's raw text, None if it
    was not recorded; UserError if the file is damaged."""
    path = f"{prefix}.raw.json"
    if not os.path.exists(path):
        return None
    checksums.check(path)
    content = read_named(path, "run fairseq-preprocess again")
    try:
        values = json.loads(content)
        is_valid = values.keys() == asdict(RawCounts()).keys()
        is_valid = is_valid and all(type(value) is int and value > 0 for value in values.values())
    except (ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        raise UserError(f"{path}: damaged: expected bytes, words and lines; run fairseq-preprocess again")
    return RawCounts(**values)
