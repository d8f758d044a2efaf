"""The lines of a corpus in another order, without a copy of their tokens."""

from __future__ import annotations

import numpy as np


class ShuffledLines:
    """Map from places in a corpus with shuffled lines to places in the corpus.

    A line is moved whole, with the ``</s>`` that ends it. 16 bytes a line are kept, whatever the number of tokens;
    a look-up is a binary search among the lines.

    Args:
        sizes: int [lines], the tokens of each line.
        seed: of the order, which follows from it and the number of lines alone.
    """

    def __init__(self, sizes: np.ndarray, seed: int) -> None:
        sizes = np.asarray(sizes)
        count = len(sizes)
        order = np.arange(count, dtype=np.int32 if count <= np.iinfo(np.int32).max else np.int64)
        np.random.RandomState(seed % 2**32).shuffle(order)
        shuffled = sizes[order]
        self._ends = np.cumsum(shuffled, dtype=np.int64)
        starts = np.cumsum(sizes, dtype=np.int64)
        starts -= sizes
        self._shifts = starts[order]
        self._shifts -= self._ends
        self._shifts += shuffled

    def places(self, places: np.ndarray) -> np.ndarray:
        """The places in the corpus of the tokens at *places* (any shape, 0 … tokens − 1) of the shuffled lines."""
        return places + self._shifts[np.searchsorted(self._ends, places, side="right")]
