"""Words of text files and their counts, in several processes, a part of a file at a time."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

from fairseq.errors import UserError
from fairseq.system.opening import BOM
from fairseq.system.terminal import byte_bar
from fairseq.system.workers import Workers
from fairseq.text.raw_text import check_raw
from fairseq.text.tokenizers.rules import WordRule

CHUNK_BYTES = 1 << 24  # given to a process at once
BLOCK_BYTES = 1 << 20  # decoded at once
LINE_END = "\n"  # among words: the </s> of a line

R = TypeVar("R")


def count_words(paths: Iterable[str], workers: int = 1, rule: WordRule | None = None) -> Counter[str]:
    """Return the count of each word of the texts *paths*, counted by *workers* processes.

    Args:
        rule: joins subwords; None: words are what white space separates.

    Raises:
        UserError: a text is missing, empty or not UTF-8, or a process died.
    """
    counter: Counter[str] = Counter()
    with Workers(functools.partial(_count_part, rule), workers) as pool:
        for path in paths:
            for counts in over(pool, path, "counting" if rule is None else "counting words of"):
                counter.update(counts)
    return counter


def _count_part(rule: WordRule | None, path: str, start: int, end: int) -> Counter[str]:
    counter: Counter[str] = Counter()
    blocks = text_blocks(path, start, end)
    parts: Iterable[list[str]] = map(str.split, blocks)
    if rule is not None:
        parts = (words for words, _ in read_words(blocks, rule))
    for words in parts:
        counter.update(words)
    # `</s>` is a special symbol of every dictionary, and no word to be counted.
    del counter[LINE_END]
    return counter


def read_words(blocks: Iterable[str], rule: WordRule) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the words of text that comes in *blocks*,
    cut at white space, and the number of tokens of each.

    ``LINE_END`` stands at the end of each line.
    A word split between two blocks is yielded with the second.
    """
    pending: list[str] = []  # last word of a line that continues in the next block
    unfinished = False
    for text in blocks:
        words: list[str] = []
        lengths: list[int] = []
        *lines, rest = text.split("\n")
        unfinished = not text.endswith("\n")
        for line in lines:
            whole_words, counts = _line_words(pending + line.split(), rule)
            words += whole_words
            lengths += counts
            pending = []
        pending = pending + rest.split()
        if pending:
            whole_words, counts = rule.group(pending)
            # The last word of a block may continue in the next one.
            words += whole_words[:-1]
            lengths += counts[:-1]
            pending = pending[-counts[-1] :]
        yield words, lengths
    if unfinished:
        yield _line_words(pending, rule)


def _line_words(tokens: list[str], rule: WordRule) -> tuple[list[str], list[int]]:
    """The words of a line of *tokens* and its end, with the number of tokens of each."""
    words, counts = rule.group(tokens) if tokens else ([], [])
    return [*words, LINE_END], [*counts, 1]


def over(pool: Workers[R], path: str, doing: str) -> Iterator[R]:
    """The results of the pool's ``task(path, start, end)`` for the parts of *path*, in order, with
    a progress bar."""
    size = check_raw(path)
    # A small file is divided among all processes, too.
    chunks = list(_chunks(path, min(CHUNK_BYTES, -(-size // pool.count))))
    with byte_bar(size, f"{doing} {os.path.basename(path)}") as report:
        # Offsets and not text go to the processes: each reads its part from the file itself.
        results = pool.map((path, start, end) for start, end in chunks)
        for (start, end), result in zip(chunks, results, strict=True):
            report(end - start)
            yield result


def _chunks(path: str, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a file, without a byte-order mark, behind line feeds into parts of about *chunk_bytes*:
    (first byte, end)."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        # Windows' editors begin UTF-8 with a mark that is no letter of the first word.
        start = len(BOM) if file.read(len(BOM)) == BOM else 0
        while start < size:
            end = start + chunk_bytes
            file.seek(end)
            # Behind a line feed, so that the division among
            # processes cuts no word or character in two.
            while end < size and (block := file.read(BLOCK_BYTES)):
                end_of_line = block.find(b"\n")
                if end_of_line >= 0:
                    end += end_of_line + 1
                    break
                end += len(block)
            yield start, min(end, size)
            start = end


def text_blocks(path: str, start: int, end: int) -> Iterator[str]:
    """The text between two bytes, its lines ended by ``\\n``, in pieces that end behind a line or
    at a space.

    A line longer than a piece is cut at a space,
    so that memory does not depend on how long lines are.
    """
    rest = b""
    with open(path, "rb") as file:
        file.seek(start)
        while start + len(rest) < end:
            block = file.read(min(BLOCK_BYTES, end - start - len(rest)))
            if not block:
                raise UserError(f"{path}: the text became shorter while it was read; start again when it is complete")
            rest += block
            # Neither byte is a part of another character in UTF-8.
            cut = len(rest) if start + len(rest) >= end else (rest.rfind(b"\n") + 1 or rest.rfind(b" ") + 1)
            if cut:
                try:
                    text = rest[:cut].decode("utf-8")
                except UnicodeDecodeError as error:
                    offset, byte = start + error.start, rest[error.start]
                    # An invalid byte in the part of another process,
                    # which comes first, is reported instead.
                    line = 1 + sum(before.count("\n") for before in text_blocks(path, 0, offset))
                    raise UserError(
                        f"{path}: line {line}, byte offset {offset}: 0x{byte:02x} is not UTF-8; convert the text, as "
                        "with iconv"
                    ) from None
                yield text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
                start, rest = start + cut, rest[cut:]
