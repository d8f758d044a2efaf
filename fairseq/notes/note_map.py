"""HTML page with a labelled map of notes."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np

from fairseq.notes.study import Neighbour, Note
from fairseq.system import pages
from fairseq.system.terminal import page_text

SIDE = 900
FONT = 9  # size of a label, in the units of the map
HEAD = ("word", "occurrences", "taken", "age", "norm", "nearest notes", "nearest tokens")
NARROW, WIDE, HEIGHT = 0.6, 1.05, 1.25  # of a character, as shares of the size of the font
LABELS = 60  # most points labelled on the map; the others are labelled under the pointer

Neighbours = Mapping[str, tuple[Sequence[Neighbour], Sequence[Neighbour]]]
"""Nearest notes and nearest tokens, by word."""


def as_page(notes: Sequence[Note], positions: np.ndarray, neighbours: Neighbours, facts: Mapping[str, object]) -> str:
    """One self-contained HTML page.

    Args:
        notes: the points of the map.
        positions: their coordinates, [n, 2].
        neighbours: of some words.
        facts: name → value, for the head of the page.
    """
    low, high = positions.min(0), positions.max(0)
    scaled = 20 + (positions - low) / np.maximum(high - low, 1e-12) * (SIDE - 40)  # with a margin
    labels = set(without_overlap(scaled, [note.word for note in notes], FONT, LABELS))
    points = "\n".join(
        _point(note, x, y, number in labels) for number, (note, (x, y)) in enumerate(zip(notes, scaled, strict=True))
    )
    drawn = f'<svg viewBox="0 0 {SIDE} {SIDE}">\n{points}\n</svg>'
    introduction = pages.paragraphs(["The first two principal components. Point at a note to see its numbers."])
    nearest = pages.table(table(notes, neighbours))
    body = [pages.section("Map", introduction, drawn), pages.section("Neighbours", nearest)]
    return pages.page("Notes", facts, "\n".join(body), _STYLE)


def table(notes: Sequence[Note], neighbours: Neighbours) -> list[list[str]]:
    """Rows of cells: the numbers of each word of *neighbours*,
    if it is one of *notes*, and its nearest ones."""
    by_word = {note.word: note for note in notes}
    return [list(HEAD), *(_row(by_word.get(word), word, *nearest) for word, nearest in neighbours.items())]


def width(text: str, size: float) -> float:
    """Approximate width of *text* in a proportional font of *size*."""
    return sum(size * (WIDE if unicodedata.east_asian_width(char) in "WF" else NARROW) for char in text)


def without_overlap(positions: np.ndarray, words: Sequence[str], size: float, most: int) -> list[int]:
    """Return the points whose labels fit beside them, the first points first, at most *most*.

    Args:
        positions: [n, 2], in the units of the font's *size*; a label begins at its point.
        words: the labels, [n].
    """
    chosen: list[int] = []
    boxes = np.zeros((0, 3))  # left, right and middle of the labels chosen
    for number, (x, y) in enumerate(positions):
        if len(chosen) == most:
            break
        right = x + width(words[number], size)
        apart = (boxes[:, 0] > right) | (boxes[:, 1] < x) | (np.abs(boxes[:, 2] - y) > HEIGHT * size)
        if apart.all():
            # The first points come first: a label once placed is not moved for a later one.
            chosen.append(number)
            boxes = np.vstack([boxes, (x, right, y)])
    return chosen


def _point(note: Note, x: float, y: float, label: bool) -> str:
    word = page_text(note.word)
    title = f"{word}: {note.count} occurrences, {note.taken} taken, norm {note.norm:.3g}"
    return (
        f'<g{" class=named" if label else ""}><title>{title}</title><circle cx="{x:.1f}" cy="{SIDE - y:.1f}" r="3"/>'
        f'<text x="{x + 4:.1f}" y="{SIDE - y + 3:.1f}">{word}</text></g>'
    )


def _row(note: Note | None, word: str, near: Sequence[Neighbour], tokens: Sequence[Neighbour]) -> list[str]:
    age = note and ("never written" if note.age is None else note.age)
    numbers = ("", "", "", "") if note is None else (note.count, note.taken, age, f"{note.norm:.3g}")
    nearest = (", ".join(f"{one.word} {one.cosine:.2f}" for one in some) for some in (near, tokens))
    return [word, *map(str, numbers), *nearest]


_STYLE = """
svg { width: 100%; max-width: 70rem; background: #fff; border: 1px solid var(--line); } circle { fill: #0072B2; }
svg text { font: 9px system-ui, sans-serif; fill: #333; visibility: hidden; } .named text { visibility: visible; }
g:hover circle { fill: #D55E00; }
g:hover text { font-size: 14px; font-weight: bold; fill: #000; visibility: visible; }
td:nth-last-child(-n+2), th:nth-last-child(-n+2) { text-align: start; }
"""
