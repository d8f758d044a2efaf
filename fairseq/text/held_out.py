"""Parts of texts, held out from training: their end, cut between documents."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fairseq.errors import UserError
from fairseq.text.raw_text import BLANKS, BLOCK_BYTES, TextFormat, lines_of, read_blocks

SEARCHED = 1 << 20  # bytes behind a cut in which a space is looked for, at most


@dataclass(frozen=True)
class Part:
    """A part of a text in a file of its own, and its place in the text for messages."""

    path: str
    place: str


def split_text(
    paths: Sequence[str], form: TextFormat, shares: Mapping[str, float], folder: str | Path
) -> dict[str, Part]:
    """Cut the texts *paths*, one after the other, into files in *folder*: training text first, then
    a part for each of *shares*, by name.

    A share is one of the lines; of JSON lines and tables, one of the rows. Every part has a line. A
    cut is behind a blank line if there is one in the first half of the part, else behind a line.
    Documents shorter than that are held out whole, with no neighbours of training lines. A text of
    fewer lines than parts is cut at spaces, by its bytes. Compressed files are written as plain
    text, tables as JSON lines.

    Raises:
        UserError: a text cannot be read, or they are too short to have something in every part.
    """
    whole = os.path.join(folder, "whole")
    with open(whole, "wb") as out:
        lines = sum(_append(path, form, out) for path in paths)
    names = ["train", *shares]
    counts = [max(1, round(lines * share)) for share in shares.values()]
    with open(whole, "rb") as file:
        if lines >= len(names):
            places, ends = _cut_lines(file, [max(1, lines - sum(counts)), *counts], form)
        else:
            places, ends = _cut_words(file, list(shares.values()))
        file.seek(0)
        parts = {}
        for name, place, end in zip(names, places, ends, strict=True):
            target = os.path.join(folder, f"{name}.{'txt' if form.field is None else 'jsonl'}")
            if end <= file.tell() or form.field is not None and lines < len(names):
                raise UserError(f"{paths[0]}: too short to leave text for {name}; give each split a text of its own")
            _copy(file, end, target)
            parts[name] = Part(target, place)
    os.remove(whole)
    return parts


def _append(path: str, form: TextFormat, out: BinaryIO) -> int:
    """Append a text to *out*, each line ended by a line feed; return the number of its lines."""
    lines, data = 0, b""
    for block in read_blocks(path, form):
        # Mistakes are reported here, where lines have
        # the numbers of the file that the user knows.
        lines_of(block, form)
        data = block.data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines += data.count(b"\n")
        out.write(data)
    # Neither the last line of a text nor its last paragraph goes on in the next text.
    end = b"\n" * ((not data.endswith(b"\n")) + form.join_lines) if data else b""
    out.write(end)
    return lines + len(end)


def _cut_lines(file: BinaryIO, counts: Sequence[int], form: TextFormat) -> tuple[list[str], list[int]]:
    """The lines of each part, as text, and where it ends; *counts* are lines of parts before the
    cuts move."""
    places, ends = [], []
    first = line = 1
    for number, planned in enumerate(itertools.accumulate(counts)):
        for _ in range(planned - line + 1):
            file.readline()
        line = planned + 1
        end, behind = file.tell(), line
        # Rows of JSON lines are documents.
        searched = counts[number + 1] // 2 if number + 1 < len(counts) and form.field is None else 0
        for _ in range(searched):
            behind += 1
            if not file.readline().strip(BLANKS):
                end, line = file.tell(), behind
                break
        file.seek(end)
        places.append(f"lines {first} to {line - 1}")
        ends.append(end)
        first = line
    return places, ends


def _cut_words(file: BinaryIO, shares: Sequence[float]) -> tuple[list[str], list[int]]:
    """As :func:`_cut_lines`, at spaces; a part without text ends where it begins."""
    size = file.seek(0, os.SEEK_END)
    ends = []
    for number, share in enumerate(shares):
        at = int(size * (1 - sum(shares[number:])))
        file.seek(at)
        ahead = file.read(min(SEARCHED, int(size * share / 2)))
        # Without a space, as in text without spaces between words, before the next character.
        space, character = re.search(rb"[ \t\n]", ahead), re.search(rb"[^\x80-\xbf]", ahead)
        ends.append(at + (space.end() if space else character.start() if character else 0))
    starts, ends = [0, *ends], [*ends, size]
    return [f"bytes {start} to {end}" for start, end in zip(starts, ends, strict=True)], ends


def _copy(file: BinaryIO, end: int, target: str) -> None:
    """Write *file* up to the offset *end* to a new file."""
    with open(target, "wb") as out:
        while block := file.read(min(BLOCK_BYTES, end - file.tell())):
            out.write(block)
