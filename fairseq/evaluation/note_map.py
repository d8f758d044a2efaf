"""HTML page with a labelled map of notes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fairseq.evaluation.notes import Neighbour, Note
from fairseq.terminal import page_text

SIDE = 900
LABELS = 60  # points labelled on the map; the others are labelled under the pointer


def as_page(
    notes: Sequence[Note],
    places: np.ndarray,
    neighbours: Mapping[str, tuple[Sequence[Neighbour], Sequence[Neighbour]]],
    facts: Mapping[str, Any],
) -> str:
    """One self-contained HTML page.

    Args:
        notes: the points of the map.
        places: their coordinates, [n, 2].
        neighbours: nearest notes and nearest tokens of some words.
        facts: name → value, for the head of the page.
    """
    rows = "\n".join(f"<dt>{page_text(n)}</dt><dd>{page_text(str(v))}</dd>" for n, v in facts.items())
    points = "\n".join(
        _point(note, x, y, number < LABELS)
        for number, (note, (x, y)) in enumerate(zip(notes, _scaled(places), strict=True))
    )
    by_word = {note.word: note for note in notes}
    table = "\n".join(_row(by_word.get(word), word, *found) for word, found in neighbours.items())
    parts = {"facts": rows, "points": points, "rows": table}
    return re.sub(r"\{(facts|points|rows)\}", lambda found: parts[found[1]], _PAGE)


def _scaled(places: np.ndarray) -> np.ndarray:
    """*places* scaled to a square of :data:`SIDE` with a margin."""
    low, high = places.min(0), places.max(0)
    return 20 + (places - low) / np.maximum(high - low, 1e-12) * (SIDE - 40)


def _point(note: Note, x: float, y: float, named: bool) -> str:
    word = page_text(note.word)
    title = f"{word}: {note.count} occurrences, {note.taken} taken, norm {note.norm:.3g}"
    return (
        f'<g{" class=named" if named else ""}><title>{title}</title><circle cx="{x:.1f}" cy="{SIDE - y:.1f}" r="3"/>'
        f'<text x="{x + 4:.1f}" y="{SIDE - y + 3:.1f}">{word}</text></g>'
    )


def _row(note: Note | None, word: str, near: Sequence[Neighbour], tokens: Sequence[Neighbour]) -> str:
    numbers = ("", "", "", "") if note is None else (note.count, note.taken, _age(note), f"{note.norm:.3g}")
    cells = [word, *map(str, numbers), listed(near), listed(tokens)]
    return "<tr>" + "".join(f"<td>{page_text(cell)}</td>" for cell in cells) + "</tr>"


def listed(neighbours: Sequence[Neighbour]) -> str:
    """Words with their cosines in one line."""
    return ", ".join(f"{one.word} {one.cosine:.2f}" for one in neighbours)


def _age(note: Note) -> str:
    return "never written" if note.age is None else str(note.age)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Notes</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
svg { width: 100%; border: 1px solid #ccc; } circle { fill: #0072B2; }
svg text { font-size: 9px; fill: #333; visibility: hidden; } .named text { visibility: visible; }
g:hover circle { fill: #D55E00; }
g:hover text { font-size: 14px; font-weight: bold; fill: #000; visibility: visible; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: left; }
</style></head><body>
<h1>Notes</h1>
<dl>
{facts}
</dl>
<h2>Map</h2>
<p>The first two principal components. Point at a note to see its numbers.</p>
<svg viewBox="0 0 900 900">
{points}
</svg>
<h2>Neighbours</h2>
<table>
<tr><th>word</th><th>occurrences</th><th>taken</th><th>age</th><th>norm</th><th>nearest notes</th>
<th>nearest tokens</th></tr>
{rows}
</table>
</body></html>
"""
