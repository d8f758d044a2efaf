"""An array in a file, read piece by piece: a file
that changes while it is read is an error, not a crash.

A memory map of a file that is truncated ends the process with SIGBUS, and one that is overwritten
reads other numbers.
"""

from __future__ import annotations

import os
import resource
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator

import numpy as np

from fairseq.errors import UserError
from fairseq.system.checksums import Checksum
from fairseq.system.lazy_array import LazyArray

_WINDOW = 1 << 16  # elements read together where single ones are wanted
_PIECE = 1 << 20
_RUNS = 1 << 10  # runs of neighbours that are read one by one
# Elements that are skipped within a run: reading them costs less than another system call.
_NEAR = 16
_MOST_OPEN = 4096  # files


class _Descriptor:
    """An open file; it is closed when nobody uses it any more,
    so that a read in another thread can finish."""

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    # `os.close` is bound early: at the interpreter's exit modules are gone.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "number"):  # not if opening failed
            close(self.number)


_files: OrderedDict[tuple[str, int], _Descriptor] = OrderedDict()  # by path and stamp, the one read last at the end
_files_lock = threading.Lock()


def _opened(path: str, stamp: int) -> _Descriptor:
    """Return *path*, open; what has another *stamp*, such as a replaced file, is another file."""
    key = path, stamp
    with _files_lock:
        if key in _files:
            _files.move_to_end(key)
            return _files[key]
    # Opened outside the lock, since a network filesystem
    # may be slow: two threads may open the same file.
    descriptor = _Descriptor(path)
    # Half as many as the process may open: sockets and libraries need the others.
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = _MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, soft // 2))
    with _files_lock:
        _files[key] = descriptor
        while len(_files) > most:
            _files.popitem(last=False)
    return descriptor


class StoredArray(LazyArray):
    """A one-dimensional array in a file, *offset* bytes from its beginning; only what is asked for
    is in memory.

    The file is open only while it is among those read last,
    so that thousands of arrays need few descriptors.

    Raises:
        OSError: the file cannot be opened.
    """

    __slots__ = ("_crc", "_offset", "_stamp", "path")

    def __init__(self, path: str, dtype: np.dtype | str, count: int, offset: int = 0) -> None:
        super().__init__(dtype, count)
        self.path = path
        self._offset = offset
        self._crc: int | None = None
        self._stamp = _stamp(os.stat(path))
        _opened(path, self._stamp)

    @property
    def crc(self) -> int:
        """The CRC-32 that the array was sealed with; 0 without."""
        return self._crc or 0

    def seal(self, crc: int) -> None:
        """Accept a later time stamp of the file as long
        as its bytes up to the array's end have the CRC-32 *crc*."""
        self._crc = crc

    def examine(self, checksum: Checksum) -> Iterator[np.ndarray]:
        """Yield the whole array in pieces, add it and the bytes
        before it to *checksum*, and :meth:`seal` it."""
        checksum.add(self._header())
        for piece in self.pieces(_PIECE):
            checksum.add(piece.view(np.uint8).data)
            yield piece
        self.seal(checksum.crc)

    def is_unchanged(self) -> bool:
        """Return whether the file at the path is still the one that was read."""
        return stamp(self.path) == self._stamp

    def _run(self, first: int, last: int) -> np.ndarray:
        elements = self._read(first, last)
        self._check_stamp()
        return elements

    def _gather(self, flat: np.ndarray) -> np.ndarray:
        """The elements at *flat*; rising ones close to each other,
        as in rows of a batch, are read together."""
        step = np.diff(flat)
        breaks = np.flatnonzero((step < 0) | (step > _NEAR)) + 1
        elements = self._gather_windows(flat) if len(breaks) > _RUNS else self._gather_runs(flat, breaks)
        self._check_stamp()
        return elements

    def _gather_runs(self, flat: np.ndarray, breaks: np.ndarray) -> np.ndarray:
        """Read one run of the file for each part of *flat* between *breaks*."""
        bounds = np.concatenate([[0], breaks, [len(flat)]])
        starts = flat[bounds[:-1]]
        ends = np.cumsum(flat[bounds[1:] - 1] - starts + 1)  # of each run in the buffer
        buffer, size = np.empty(int(ends[-1]), self.dtype), self.dtype.itemsize
        view, first = buffer.view(np.uint8).data, 0
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self._fill(view[first * size : end * size], self._offset + start * size)
            first = end
        shift = np.concatenate([[0], ends[:-1]]) - starts
        return buffer[flat + np.repeat(shift, np.diff(bounds))]

    def _gather_windows(self, flat: np.ndarray) -> np.ndarray:
        """Read windows of the file, because single elements are scattered over it."""
        elements = np.empty(flat.shape, self.dtype)
        window = flat // _WINDOW
        order = np.argsort(window, kind="stable")
        numbers, firsts = np.unique(window[order], return_index=True)
        for number, columns in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
            piece = self._read(number * _WINDOW, min((number + 1) * _WINDOW, len(self)))
            elements[columns] = piece[flat[columns] - number * _WINDOW]
        return elements

    def _read(self, first: int, last: int) -> np.ndarray:
        elements = np.empty(last - first, self.dtype)
        self._fill(elements.view(np.uint8).data, self._offset + first * self.dtype.itemsize)
        return elements

    def _header(self) -> bytes:
        """The bytes before the array."""
        header = bytearray(self._offset)
        self._fill(memoryview(header), 0)
        return bytes(header)

    def _fill(self, view: memoryview, at: int) -> None:
        """Read into *view*, bytes, what is in the file from byte *at* on."""
        file = self._open()
        try:
            while view:
                # pread has no position of its own, so that threads may share the descriptor.
                count = os.preadv(file.number, [view], at)
                if count == 0:
                    raise self._changed()
                view, at = view[count:], at + count
        except OSError as error:
            raise self._unreadable(error) from None

    def _open(self) -> _Descriptor:
        try:
            return _opened(self.path, self._stamp)
        except OSError as error:
            raise self._unreadable(error) from None

    def _check_stamp(self) -> None:
        """Raise UserError if another content was read than was checked."""
        # After the read: a change before it would go unnoticed otherwise.
        stamp = _stamp(os.fstat(self._open().number))
        if stamp == self._stamp:
            return
        if self._crc is None:
            raise self._changed()
        # A copy or `touch` changes the stamp, but not the content.
        crc = zlib.crc32(self._header())
        for first in range(0, len(self), _PIECE):
            crc = zlib.crc32(self._read(first, min(first + _PIECE, len(self))).view(np.uint8).data, crc)
        if crc != self._crc:
            raise self._changed()
        self._stamp = stamp

    def _unreadable(self, error: OSError) -> UserError:
        return UserError(f"{self.path}: cannot be read ({error.strerror}); check the disk")

    def _changed(self) -> UserError:
        return UserError(
            f"{self.path}: changed while it was read; start again when it is complete (replace files, do not overwrite "
            "them)"
        )


def stamp(path: str) -> int | None:
    """A number that changes with the file at *path*, its size and the time of its last change; None
    without a file."""
    try:
        return _stamp(os.stat(path))
    except OSError:
        return None


def _stamp(status: os.stat_result) -> int:
    # One number, because a corpus may have thousands of files.
    return hash((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
