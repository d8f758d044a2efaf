"""Parts of one text, held out from training: its end, cut between documents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fairseq.errors import UserError
from fairseq.text.raw_text import BLANKS, BLOCK_BYTES, TextFormat, lines_of, read_blocks

SEARCHED = 1 << 20  # bytes behind a cut in which the end of a document is looked for, at most


@dataclass(frozen=True)
class Part:
    """Consecutive lines of a text, numbered from 1, in a file of their own."""

    path: str
    first: int
    last: int


def split_text(path: str, form: TextFormat, shares: Mapping[str, float], folder: str | Path) -> dict[str, Part]:
    """Cut the text at *path* into files in *folder*: training text first, then a part for each of
    *shares*, by name.

    A cut is behind a blank line if there is one in the first half of the part, else behind a line.
    Documents shorter than that are held out whole, with no neighbours of training lines. Compressed
    files are written as plain text, tables as JSON lines.

    Raises:
        UserError: the text cannot be read, or is too short to have lines in every part.
    """
    text = os.path.join(folder, "whole")
    with open(text, "wb") as out:
        for block in read_blocks(path, form):
            # Mistakes are reported here, where lines have
            # the numbers of the file that the user knows.
            lines_of(block, form)
            out.write(block.data)
    with open(text, "rb") as file:
        ends = [*_cuts(file, os.path.getsize(text), form, list(shares.values())), os.path.getsize(text)]
        file.seek(0)
        parts, line = {}, 1
        for name, end in zip(("train", *shares), ends, strict=True):
            target = os.path.join(folder, f"{name}.{'txt' if form.field is None else 'jsonl'}")
            lines = _copy(file, end, target)
            if not lines:
                raise UserError(f"{path}: too short to leave lines for {name}; give each split a text of its own")
            parts[name] = Part(target, line, line + lines - 1)
            line += lines
    os.remove(text)
    return parts


def _cuts(file: BinaryIO, size: int, form: TextFormat, shares: Sequence[float]) -> Iterator[int]:
    """The offsets at which the training text, and each part but the last, end."""
    for number, share in enumerate(shares):
        # With at most half of a part searched, no part is left empty where documents are longer
        # than the part.
        yield _cut(file, int(size * (1 - sum(shares[number:]))), min(SEARCHED, int(size * share / 2)), form)


def _cut(file: BinaryIO, target: int, searched: int, form: TextFormat) -> int:
    """The end of a blank line within *searched* bytes of the offset *target*, or else of the line
    that is there."""
    file.seek(max(target - 1, 0))
    file.readline()
    first = at = file.tell()
    # Rows of JSON lines are documents.
    while form.field is None and at < first + searched and (line := file.readline()):
        at += len(line)
        if not line.strip(BLANKS):
            return at
    return first


def _copy(file: BinaryIO, end: int, target: str) -> int:
    """Write *file* up to the offset *end* to a new file; return the number of its lines."""
    lines, is_open = 0, False
    with open(target, "wb") as out:
        while block := file.read(min(BLOCK_BYTES, end - file.tell())):
            out.write(block)
            lines, is_open = lines + block.count(b"\n"), not block.endswith(b"\n")
    return lines + is_open
