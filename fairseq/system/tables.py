"""Tables of a command's output: aligned on a terminal, else in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], left: int = 0, terminal: bool | None = None) -> list[str]:
    """Return the lines of a table for stdout:
    aligned on a *terminal*, else Markdown; see :func:`markdown`."""
    if not (sys.stdout.isatty() if terminal is None else terminal):
        return markdown(rows, left)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    lines = ["  ".join(row).rstrip() for row in cells]
    return [lines[0], "─" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]]


def markdown(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return the lines of a table of *rows*, the first of them the head;
    the *left* first columns are left-aligned."""
    # A bar would end the cell, also in names of files.
    lines = [" | ".join(cell.replace("|", "/") for cell in row) for row in rows]
    rule = " | ".join("---" if number < left else "---:" for number in range(len(rows[0])))
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])]
