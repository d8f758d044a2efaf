"""A corpus as two files, in fairseq's ``mmap`` format.

``.bin`` holds the tokens of all lines end to end. ``.idx`` holds, little endian: the magic bytes, a
version (uint64), a code for the tokens' type (uint8), the number of lines (uint64), the lines'
sizes in tokens (int32 each) and where each line starts, in bytes (int64 each).
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import numpy as np

from fairseq.errors import UserError
from fairseq.system.checksums import Checksum, Verification
from fairseq.system.files import atomic_file
from fairseq.system.lazy_array import JoinedArray
from fairseq.system.opening import read_errors
from fairseq.system.stored_array import StoredArray
from fairseq.text.dictionary import Dictionary

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no tokens
MISSING = "make it with fairseq-preprocess"  # advice
_HEADER = struct.Struct("<9sQBQ")  # magic, version, type, lines
_STEP = 1 << 20  # lines looked at together


def token_dtype(num_symbols: int) -> np.dtype:
    """The type that fairseq stores the tokens of a dictionary of *num_symbols* in: uint16, or int32
    from 65,500 on."""
    # fairseq's bound, some below 2¹⁶: other files would differ byte by byte.
    return np.dtype("<u2" if num_symbols < 65500 else "<i4")


class Corpus(Protocol):
    """Tokens in lines: what :class:`~fairseq.data.token_blocks.TokenBlocks` cuts into blocks.

    ``tokens`` is a flat integer array [N], ``sizes`` the lines' lengths [lines], ``offsets`` int64
    [lines + 1] the tokens before each line, and at the end all. Large corpora leave tokens and
    sizes in their files: slices of them are arrays, and offsets take memory for each line.
    """

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def sizes(self) -> np.ndarray: ...
    @property
    def offsets(self) -> np.ndarray: ...


class Files(Protocol):
    """Data in files."""

    def is_unchanged(self) -> bool:
        """Return whether the files are still those that were opened."""


T = TypeVar("T", bound=Files)


def reopen(cache: dict[Any, T], key: Hashable, open_data: Callable[[], T]) -> T:
    """Return the data of *key*: those in *cache* if their
    files are unchanged, else newly opened by *open_data*."""
    data = cache.get(key)
    if data is None or not data.is_unchanged():
        data = cache[key] = open_data()
    return data


class IndexedCorpus:
    """A corpus in files; no token or line is in memory before it is indexed.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``.
        verification: of the folder, where several of its corpora are opened.

    Raises:
        UserError: a file is missing, truncated, corrupt or not as in ``checksums.txt``, or the
            corpus has no tokens.

    Attributes:
        tokens: flat array [N] in the file, uint16 or int32.
        sizes: int32 [lines] in the file, the tokens of each line.
        offsets: int64 [lines + 1] in memory, the tokens before each line, and at the end all.
    """

    def __init__(self, prefix: str, verification: Verification | None = None) -> None:
        self.prefix = prefix
        index, data = f"{prefix}.idx", f"{prefix}.bin"
        verification = verification or Verification(os.path.dirname(prefix))
        dtype, lines = _read_header(index)
        self.sizes: Any = StoredArray(index, "<i4", lines, _HEADER.size)
        # The sum of the sizes, and so the length that the other file must have.
        total = _check_lines(self.sizes, dtype.itemsize, verification)
        # Lengths are compared first: a file that was cut off is called truncated, not corrupt.
        if _file_size(data) != total * dtype.itemsize:
            raise UserError(
                f"{data}: {_file_size(data)} bytes, but {index} expects {total * dtype.itemsize}: "
                "truncated or from another run; preprocess the text again"
            )
        if total == 0:
            raise UserError(f"{data}: no tokens in it; preprocess a text that is not empty")
        with read_errors(data, MISSING):
            self.tokens: Any = StoredArray(data, dtype, total)
        self._symbols = 0  # dictionaries of at least so many symbols have all tokens; 0: unknown

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[object, ...]:
        # Another process opens the files itself.
        return type(self), (self.prefix,)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        return _offsets(self.sizes)

    def check(self, dictionary: Dictionary, verification: Verification | None = None) -> None:
        """Read the tokens once, in pieces; they are not
        read again for the same or a larger dictionary.

        Raises:
            UserError: a token is not an id of *dictionary*,
                or the file is not as in ``checksums.txt``.
        """
        # The highest id of the file is known: for a larger dictionary nothing can be out of range.
        if 0 < self._symbols <= len(dictionary):
            return
        checksum = Checksum(f"{self.prefix}.bin", verification or Verification(os.path.dirname(self.prefix)))
        before = highest = 0
        for piece in self.tokens.examine(checksum):
            highest = max(highest, int(piece.max()))
            if highest >= len(dictionary) or int(piece.min()) < 0:
                at = int(np.argmax((piece >= len(dictionary)) | (piece < 0)))
                raise UserError(
                    f"{self.prefix}.bin: token {before + at} is number {int(piece[at])}, but the dictionary "
                    f"has {len(dictionary)} symbols; use the dict.txt that the text was preprocessed with"
                )
            before += len(piece)
        checksum.check()
        self._symbols = highest + 1

    def checksums(self) -> dict[str, int]:
        """CRC-32 of the lines and of the tokens, by name of their file."""
        return {os.path.basename(array.path): array.crc for array in (self.sizes, self.tokens)}

    def is_unchanged(self) -> bool:
        """Return whether the files are still those that were checked."""
        return self.sizes.is_unchanged() and self.tokens.is_unchanged()


class JoinedCorpus:
    """Corpora, at least one, read one after the other:
    an :class:`IndexedCorpus` of several pairs of files."""

    def __init__(self, parts: Sequence[IndexedCorpus]) -> None:
        self.parts = list(parts)
        self.tokens: Any = JoinedArray([part.tokens for part in parts])
        self.sizes: Any = JoinedArray([part.sizes for part in parts])

    def __len__(self) -> int:
        return len(self.sizes)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        return _offsets(self.sizes)

    def check(self, dictionary: Dictionary, verification: Verification | None = None) -> None:
        for part in self.parts:
            part.check(dictionary, verification)

    def checksums(self) -> dict[str, int]:
        return {name: crc for part in self.parts for name, crc in part.checksums().items()}

    def is_unchanged(self) -> bool:
        return all(part.is_unchanged() for part in self.parts)


def token_count(prefix: str) -> int:
    """Return the number of tokens of a corpus by the length of its file; UserError if it is missing
    or no corpus."""
    return _file_size(f"{prefix}.bin") // _read_header(f"{prefix}.idx")[0].itemsize


def _offsets(sizes: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, dtype=np.int64, out=offsets[1:])
    return offsets


def _file_size(path: str) -> int:
    with read_errors(path, MISSING):
        return os.path.getsize(path)


def _read_header(path: str) -> tuple[np.dtype, int]:
    """(type of the tokens, number of lines), once the file has the right length for them."""
    with read_errors(path, MISSING), open(path, "rb") as file:
        size, header = os.fstat(file.fileno()).st_size, file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise UserError(f"{path}: not a corpus index in the mmap format; preprocess the text again")
    _, version, code, lines = _HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{path}: version {version} of the format, known is {VERSION}; preprocess the text again")
    if code not in DTYPES:
        raise UserError(f"{path}: type code {code} is not a token type; preprocess the text again")
    if size != _HEADER.size + 12 * lines:
        raise UserError(
            f"{path}: {size} bytes where {lines} lines need {_HEADER.size + 12 * lines}: truncated or corrupt; "
            "preprocess the text again"
        )
    if lines == 0:
        raise UserError(f"{path}: no lines in it; preprocess a text that is not empty")
    return np.dtype(DTYPES[code]), lines


def _check_lines(sizes: StoredArray, itemsize: int, verification: Verification) -> int:
    """The number of tokens, once every line is known to start where the one before it ends, and the
    file is whole."""
    checksum = Checksum(sizes.path, verification)
    corrupt = UserError(f"{sizes.path}: the lines do not follow one another: corrupt; preprocess the text again")
    if any(int(piece.min()) < 0 for piece in sizes.examine(checksum)):
        raise corrupt
    # The starts follow from the sizes: they are compared, and not used.
    starts = StoredArray(sizes.path, "<i8", len(sizes), _HEADER.size + 4 * len(sizes))
    first = total = 0
    for piece in starts.pieces(_STEP):
        checksum.add(piece.view(np.uint8).data)
        size = sizes[first : first + len(piece)]
        ends = np.cumsum(size, dtype=np.int64) + total
        if not np.array_equal(piece, (ends - size) * itemsize):
            raise corrupt
        first, total = first + len(piece), int(ends[-1])
    checksum.check()
    return total


class IndexedWriter:
    """Writes a corpus; used as a context manager, it leaves both files whole or none.

    Memory does not grow with the corpus. When the ``with``
    block raises, what the files held before stays.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``; the folder exists.
        dtype: type of the tokens, see :func:`token_dtype`.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        self._code = {np.dtype(name): code for code, name in DTYPES.items()}[self.dtype]
        self._lines = 0
        self._files = contextlib.ExitStack()
        self._data: BinaryIO
        self._index: BinaryIO

    def __enter__(self) -> IndexedWriter:
        # Closed in the opposite order: the data is in place
        # before the index, whose presence implies it.
        self._index = self._files.enter_context(atomic_file(f"{self.prefix}.idx"))
        self._data = self._files.enter_context(atomic_file(f"{self.prefix}.bin"))
        # Room for the header, which has the number of lines and is written last.
        self._index.write(bytes(_HEADER.size))
        # A failure there must leave neither file, as one inside the with block does.
        self._files.push(lambda kind, *_: self._finish_index() if kind is None else None)
        return self

    def add(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Append lines: *tokens* [N] of all of them,
        *sizes* [lines], which sum to N and fit in int32."""
        sizes = np.asarray(sizes)
        if int(sizes.sum(dtype=np.int64)) != len(tokens):
            raise ValueError(f"lines of {int(sizes.sum(dtype=np.int64))} tokens in all, but {len(tokens)} tokens")
        # The format stores sizes as int32; a larger one would wrap to a negative number.
        if len(sizes) and int(sizes.max()) > np.iinfo(np.int32).max:
            raise UserError(
                f"{self.prefix}: a line of {int(sizes.max())} tokens is too long; break the text into lines"
            )
        self._data.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._index.write(np.ascontiguousarray(sizes, dtype="<i4").data)
        self._lines += len(sizes)

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def _finish_index(self) -> None:
        """Add where each line starts, from the sizes read back, and the header."""
        total = 0
        for first in range(0, self._lines, _STEP):
            count = min(_STEP, self._lines - first)
            self._index.seek(_HEADER.size + 4 * first)
            sizes = np.frombuffer(self._index.read(4 * count), dtype="<i4")
            ends = np.cumsum(sizes, dtype=np.int64) + total
            self._index.seek(_HEADER.size + 4 * self._lines + 8 * first)
            self._index.write(((ends - sizes) * self.dtype.itemsize).astype("<i8").data)
            total = int(ends[-1])
        self._index.seek(0)
        self._index.write(_HEADER.pack(MAGIC, VERSION, self._code, self._lines))
