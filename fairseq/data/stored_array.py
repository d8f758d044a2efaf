"""An array in a file, read piece by piece: a file that changes while it is read is an error, not a crash.

A memory map of a file that is truncated ends the process with SIGBUS, and one that is overwritten reads other numbers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from fairseq.errors import UserError
from fairseq.files import open_regular

_WINDOW = 1 << 16  # elements read together where single ones are wanted
_PIECE = 1 << 22
_RUNS = 1 << 10  # runs of neighbours that are read one by one


class StoredArray:
    """A one-dimensional array in a file, read with ``pread``; only what is asked for is in memory.

    It has what readers of a corpus use: ``len``, ``dtype``, ``shape``, indexing by a number, a slice or an array of
    numbers (which return plain arrays), and :func:`numpy.asarray`.

    Args:
        path: the file, at least offset + count · itemsize bytes long.
        dtype: type of the elements.
        count: their number.
        offset: bytes before the first one.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, dtype: np.dtype | str, count: int, offset: int = 0) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self._count = count
        self._offset = offset
        self._file: BinaryIO = open_regular(path)
        self._stamp = self._stamped()
        self._crc: int | None = None

    def seal(self, crc: int) -> None:
        """Accept a later time stamp of the file as long as *crc*, the CRC-32 of the elements, stays the same."""
        self._crc = crc

    def __len__(self) -> int:
        return self._count

    @property
    def shape(self) -> tuple[int]:
        return (self._count,)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._run(0, self._count).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        """Return elements as a plain array (one for a number).

        Raises:
            UserError: the file has changed since it was opened.
        """
        if isinstance(index, slice):
            first, last, step = index.indices(self._count)
            if step == 1:
                return self._run(first, max(first, last))
            index = np.arange(first, last, step)
        index = np.asarray(index)
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

    def _gather(self, flat: np.ndarray) -> np.ndarray:
        """The elements at *flat*; neighbours, which rows of a batch are, are read together."""
        ends = np.flatnonzero(np.diff(flat) != 1) + 1
        found = np.empty(flat.shape, self.dtype)
        if len(ends) > _RUNS:
            self._gather_windows(flat, found)
        else:
            size = self.dtype.itemsize
            view = found.view(np.uint8).data
            bounds = [0, *ends.tolist(), len(flat)]
            starts = flat[bounds[:-1]].tolist()
            for first, last, start in zip(bounds, bounds[1:], starts, strict=False):
                self._fill(view[first * size : last * size], start)
        self._check_stamp()
        return found

    def _gather_windows(self, flat: np.ndarray, found: np.ndarray) -> None:
        """Read *found* from windows of the file, because single elements are scattered over it."""
        window = flat // _WINDOW
        order = np.argsort(window, kind="stable")
        numbers, firsts = np.unique(window[order], return_index=True)
        for number, here in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
            piece = self._read(number * _WINDOW, min((number + 1) * _WINDOW, self._count))
            found[here] = piece[flat[here] - number * _WINDOW]

    def _run(self, first: int, last: int) -> np.ndarray:
        """Elements *first* up to *last*."""
        found = self._read(first, last)
        self._check_stamp()
        return found

    def _read(self, first: int, last: int) -> np.ndarray:
        found = np.empty(last - first, self.dtype)
        self._fill(found.view(np.uint8).data, first)
        return found

    def _fill(self, view: memoryview, first: int) -> None:
        """Read the elements from *first* on into *view*, bytes."""
        at = self._offset + first * self.dtype.itemsize
        try:
            while view:
                done = os.preadv(self._file.fileno(), [view], at)
                if done == 0:
                    raise self._changed()
                view, at = view[done:], at + done
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror}); check the disk") from None

    def _check_stamp(self) -> None:
        if self._stamped() != self._stamp:
            self._check_content()

    def _check_content(self) -> None:
        """Raise UserError unless only the time stamp is new."""
        stamp, crc = self._stamped(), 0
        if self._crc is None or stamp[0] != self._stamp[0]:
            raise self._changed()
        for first in range(0, self._count, _PIECE):
            crc = zlib.crc32(self._read(first, min(first + _PIECE, self._count)).view(np.uint8).data, crc)
        if crc != self._crc:
            raise self._changed()
        self._stamp = stamp

    def _stamped(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _changed(self) -> UserError:
        return UserError(
            f"{self.path}: changed while it was read; start again when it is complete (replace files, do not overwrite "
            "them)"
        )
