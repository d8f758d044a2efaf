"""Arrays whose elements are read or computed when they
are indexed: their base, and several read as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_PIECE = 1 << 20  # elements read together where all are read


class LazyArray:
    """A one-dimensional array of *count* elements
    that holds none of them; indexing returns plain arrays.

    It has what readers of a corpus use: ``len``, ``dtype``, ``shape``, iteration, ``tolist``,
    indexing by a number, a slice, a mask or an array of numbers, and :func:`numpy.asarray`.
    Subclasses define :meth:`_run` and :meth:`_gather`.
    """

    __slots__ = ("_count", "dtype")

    def __init__(self, dtype: np.dtype | str, count: int) -> None:
        self.dtype = np.dtype(dtype)
        self._count = count

    def _run(self, first: int, last: int) -> np.ndarray:
        """Return elements *first* up to *last*, 0 ≤ first ≤ last ≤ count."""
        raise NotImplementedError

    def _gather(self, flat: np.ndarray) -> np.ndarray:
        """Return the elements at *flat*, int [N], N > 0, all of them valid and not negative."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._count

    @property
    def shape(self) -> tuple[int]:
        return (self._count,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._run(0, self._count).astype(dtype or self.dtype, copy=False)

    def __iter__(self) -> Iterator[object]:
        for piece in self.pieces(_PIECE):
            yield from piece

    def tolist(self) -> list[object]:
        return np.asarray(self).tolist()

    def __getitem__(self, index: object) -> Any:
        """Return elements as a plain array (one for a number)."""
        if isinstance(index, slice):
            first, last, step = index.indices(self._count)
            if step == 1:
                return self._run(first, max(first, last))
            index = np.arange(first, last, step)
        index = np.asarray(index)
        if index.dtype == bool:
            return self._masked(index)
        if index.size == 0:
            return np.empty(index.shape, self.dtype)
        if int(index.min()) < -self._count or int(index.max()) >= self._count:
            raise IndexError(f"index outside an array of {self._count}")
        flat = np.where(index < 0, index + self._count, index).ravel()
        return self._gather(flat).reshape(index.shape)[()]

    def pieces(self, size: int) -> Iterator[np.ndarray]:
        """Yield the whole array, *size* elements at a time."""
        for first in range(0, self._count, size):
            yield self._run(first, min(first + size, self._count))

    def _masked(self, mask: np.ndarray) -> np.ndarray:
        if mask.shape != self.shape:
            raise IndexError(f"mask of shape {mask.shape} for an array of {self._count}")
        # Not by indices, which would take eight bytes for each token of a corpus.
        masks = (mask[first : first + _PIECE] for first in range(0, self._count, _PIECE))
        pieces = [piece[marked] for piece, marked in zip(self.pieces(_PIECE), masks, strict=True)]
        return np.concatenate([np.empty(0, self.dtype), *pieces], dtype=self.dtype)


class JoinedArray(LazyArray):
    """One-dimensional arrays, at least one, read as their
    concatenation; its type is the widest of theirs."""

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
        # Rows of a batch mostly lie in one file: no sorting.
        if (number == first).all():
            return self._parts[first][flat - self._starts[first]].astype(self.dtype, copy=False)
        order = np.argsort(number, kind="stable")
        elements = np.empty(flat.shape, self.dtype)
        for columns in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
            part = int(number[columns[0]])
            elements[columns] = self._parts[part][flat[columns] - self._starts[part]]
        return elements
