"""Labels of points in a picture, without overlap."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np

NARROW, WIDE, HEIGHT = 0.6, 1.05, 1.25  # of a character, as shares of the size of the font


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
