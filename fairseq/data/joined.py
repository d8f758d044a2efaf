"""Arrays read one after the other, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class JoinedArray:
    """One-dimensional arrays of one type, such as stored ones, read as their concatenation.

    It has what readers of a corpus use: ``len``, ``dtype``, indexing by a number, a slice or an array of numbers
    (which return plain arrays), and :func:`numpy.asarray`.

    Args:
        parts: at least one array; the type is the widest of theirs.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self.dtype = np.result_type(*(part.dtype for part in parts))

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self._parts, dtype=dtype or self.dtype)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step == 1:
                return self._run(first, max(first, last))
            index = np.arange(first, last, step)
        index = np.asarray(index)
        if index.size and (int(index.min()) < -len(self) or int(index.max()) >= len(self)):
            raise IndexError(f"index outside an array of {len(self)}")
        return self._gather(np.where(index < 0, index + len(self), index))

    def _run(self, first: int, last: int) -> np.ndarray:
        """Elements *first* up to *last*."""
        pieces = [np.empty(0, self.dtype)]
        for part, end in zip(self._parts, self._ends.tolist(), strict=True):
            start = end - len(part)
            if first < end and last > start:
                pieces.append(part[max(0, first - start) : last - start])
        return np.concatenate(pieces[1:] or pieces, dtype=self.dtype)

    def _gather(self, index: np.ndarray) -> np.ndarray:
        """The elements at *index* (any shape), part by part of those it touches."""
        number = np.searchsorted(self._ends, index, side="right")
        starts = self._ends - [len(part) for part in self._parts]
        if number.size == 0 or int(number.min()) == int(number.max()):
            part = int(number.min()) if number.size else 0
            return self._parts[part][index - starts[part]].astype(self.dtype, copy=False)
        found = np.empty(index.shape, self.dtype)
        for part in np.unique(number).tolist():
            here = number == part
            found[here] = self._parts[part][index[here] - starts[part]]
        return found
