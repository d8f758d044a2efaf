"""Arrays read one after the other, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fairseq.system.lazy_array import LazyArray


class JoinedArray(LazyArray):
    """One-dimensional arrays of one type, such as stored ones, read as their concatenation.

    Args:
        parts: at least one array; the type is the widest of theirs.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        super().__init__(np.result_type(*{part.dtype for part in parts}), int(self._ends[-1]))

    def _run(self, first: int, last: int) -> np.ndarray:
        pieces = [np.empty(0, self.dtype)]
        if first < last:
            low, high = np.searchsorted(self._ends, [first, last - 1], side="right").tolist()
            starts = self._starts[low : high + 1].tolist()
            for part, start in zip(self._parts[low : high + 1], starts, strict=True):
                pieces.append(part[max(0, first - start) : last - start])
        return np.concatenate(pieces, dtype=self.dtype)

    def _gather(self, flat: np.ndarray) -> np.ndarray:
        """The elements at *flat*, part by part of those it touches."""
        number = np.searchsorted(self._ends, flat, side="right")
        first = int(number[0])
        if (number == first).all():
            return self._parts[first][flat - self._starts[first]].astype(self.dtype, copy=False)
        order = np.argsort(number, kind="stable")
        found = np.empty(flat.shape, self.dtype)
        for here in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
            part = int(number[here[0]])
            found[here] = self._parts[part][flat[here] - self._starts[part]]
        return found
