"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return the lines of a table.

    Args:
        rows: cells; the first row is the head.
        left: number of columns, the first ones, that are aligned to the left.
    """
    # A bar would end the cell, also in names of files.
    lines = [" | ".join(cell.replace("|", "/") for cell in row) for row in rows]
    rule = " | ".join("---" if number < left else "---:" for number in range(len(rows[0])))
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])]
