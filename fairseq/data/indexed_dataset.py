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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from fairseq.errors import UserError
from fairseq.system import checksums
from fairseq.system.deferred import names_of
from fairseq.system.files import atomic_file
from fairseq.system.opening import read_errors
from fairseq.text.dictionary import Dictionary

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats: no tokens
MISSING = "make it with fairseq-preprocess"  # advice
OTHER = "use the dict.txt that the text was preprocessed with"
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
    [lines + 1] the tokens before each line, and at the end all. Corpora in files leave tokens and
    sizes there, and offsets take memory for each line.
    """

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def sizes(self) -> np.ndarray: ...
    @property
    def offsets(self) -> np.ndarray: ...


class IndexedCorpus:
    """A corpus in files that are mapped into memory: nothing is read before it is indexed.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``.

    Raises:
        UserError: a file is missing, empty, truncated or something else.

    Attributes:
        tokens: flat array [N] in the file, uint16 or int32.
        sizes: int32 [lines] in the file, the tokens of each line.
        offsets: int64 [lines + 1] in memory, the tokens before each line, and at the end all.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        index, data = f"{prefix}.idx", f"{prefix}.bin"
        with read_errors(index, MISSING):
            dtype, lines = _read_header(index)
            self.sizes: np.ndarray = mapped(index, "<i4", lines, _HEADER.size)
            last = mapped(index, "<i8", lines, _HEADER.size + 4 * lines)[-1]
        # Where the last line ends: the length that the other file must have.
        size = int(last) + int(self.sizes[-1]) * dtype.itemsize
        with read_errors(data, MISSING):
            if (there := os.path.getsize(data)) != size:
                raise UserError(
                    f"{data}: {there} bytes, but {index} expects {size}: truncated or from another run; preprocess the "
                    "text again"
                )
            if size == 0:
                raise UserError(f"{data}: no tokens in it; preprocess a text that is not empty")
            self.tokens: np.ndarray = mapped(data, dtype, size // dtype.itemsize)
        self._recorded: dict[str, checksums.Entry] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[object, ...]:
        # Another process maps the files itself.
        return type(self), (self.prefix,)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        return _offsets(self.sizes)

    def check(self, dictionary: Dictionary | None, recorded: Mapping[str, checksums.Entry]) -> None:
        """Compare the files with what ``checksums.txt`` *recorded* of them by name: sizes, the
        largest token and the dictionary, unless that is None.

        Where no largest token was recorded, as in a folder of fairseq's, all are read.

        Raises:
            UserError: a size differs, a token is not an id
                of *dictionary*, or the ids are of another one.
        """
        for path in (f"{self.prefix}.idx", f"{self.prefix}.bin"):
            if entry := checksums.entry_of(path, recorded):
                entry.check_size(path, os.path.getsize(path))
                self._recorded[os.path.basename(path)] = entry
        if dictionary is None:
            return
        entry = self._recorded.get(f"{os.path.basename(self.prefix)}.bin")
        if entry is None or entry.largest is None:
            self.check_tokens(dictionary)
            return
        if entry.largest >= len(dictionary):
            raise self._too_large(entry.largest, dictionary)
        if not dictionary.has_digest(entry.dictionary):
            raise UserError(f"{self.prefix}.bin: has the ids of another dictionary than {dictionary.path}; {OTHER}")

    def check_tokens(self, dictionary: Dictionary) -> None:
        """Read all tokens, once for each state of the file; UserError if one is not an id of
        *dictionary*."""
        path = f"{self.prefix}.bin"
        smallest, largest = _range(path, self.tokens.dtype.str, os.stat(path).st_mtime_ns)
        if smallest < 0 or largest >= len(dictionary):
            raise self._too_large(smallest if smallest < 0 else largest, dictionary)

    def check_lines(self) -> None:
        """Read where each line starts; UserError unless that is where the one before it ends."""
        starts = mapped(f"{self.prefix}.idx", "<i8", len(self), _HEADER.size + 4 * len(self))
        if int(self.sizes.min()) < 0 or not np.array_equal(starts, self.offsets[:-1] * self.tokens.itemsize):
            raise UserError(
                f"{self.prefix}.idx: the lines do not follow one another: corrupt; preprocess the text again"
            )

    def _too_large(self, token: int, dictionary: Dictionary) -> UserError:
        at = int(np.argmax(self.tokens == token))
        symbols = f"the dictionary has {len(dictionary)} symbols; {OTHER}"
        return UserError(f"{self.prefix}.bin: token {at} is number {token}, but {symbols}")

    def checksums(self) -> dict[str, int]:
        """What tells the files from others, by their names: the checksums that ``checksums.txt``
        records, without it the sizes."""
        paths = (f"{self.prefix}.idx", f"{self.prefix}.bin")
        names = {os.path.basename(path): path for path in paths}
        return {
            name: self._recorded[name].crc if name in self._recorded else os.path.getsize(path)
            for name, path in names.items()
        }


class JoinedCorpus:
    """Corpora, at least one, read one after the other:
    an :class:`IndexedCorpus` of several pairs of files. Sizes of lines are in memory."""

    def __init__(self, parts: Sequence[IndexedCorpus]) -> None:
        self.parts = list(parts)
        self.tokens: Any = JoinedArray([part.tokens for part in parts])
        self.sizes: np.ndarray = np.concatenate([part.sizes for part in parts])

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.parts,)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        return _offsets(self.sizes)

    def checksums(self) -> dict[str, int]:
        return {name: crc for part in self.parts for name, crc in part.checksums().items()}


class JoinedArray:
    """Arrays, at least one, read as their concatenation without a copy of it: slices, and arrays of
    positions of any shape, give plain arrays of the widest type."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self._starts = self._ends - [len(part) for part in parts]
        self.dtype = np.result_type(*{part.dtype for part in parts})

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            first, last, _ = index.indices(len(self))
            low, high = np.searchsorted(self._ends, [first, max(first, last - 1)], side="right").tolist()
            parts = zip(self._parts[low : high + 1], self._starts[low : high + 1].tolist(), strict=True)
            pieces = [part[max(0, first - start) : max(0, last - start)] for part, start in parts]
            return np.concatenate([np.empty(0, self.dtype), *pieces], dtype=self.dtype)
        index = np.asarray(index)
        numbers = np.searchsorted(self._ends, index, side="right")
        elements = np.empty(index.shape, self.dtype)
        for number in np.unique(numbers).tolist():
            inside = numbers == number
            elements[inside] = self._parts[number][index[inside] - self._starts[number]]
        return elements[()]


def mapped(path: str, dtype: np.dtype | str, count: int, offset: int = 0) -> np.ndarray:
    """Return *count* elements of a file, *offset* bytes from its beginning, mapped into memory."""
    if count == 0:  # which cannot be mapped
        return np.empty(0, dtype)
    # A plain array: slices of a memmap are slower, because they are memmaps.
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))


def token_count(prefix: str) -> int:
    """Return the number of tokens of a corpus by the length of its file; UserError if it is missing
    or no corpus."""
    with read_errors(f"{prefix}.idx", MISSING):
        dtype, _ = _read_header(f"{prefix}.idx")
    with read_errors(f"{prefix}.bin", MISSING):
        return os.path.getsize(f"{prefix}.bin") // dtype.itemsize


def _offsets(sizes: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, dtype=np.int64, out=offsets[1:])
    return offsets


@functools.cache
def _range(path: str, dtype: str, modified: int) -> tuple[int, int]:
    """The smallest and the largest token of a file, as it was *modified* last."""
    with read_errors(path, MISSING):
        tokens = np.memmap(path, dtype, "r")
        return int(tokens.min()), int(tokens.max())


def _read_header(path: str) -> tuple[np.dtype, int]:
    """(type of the tokens, number of lines), once the file has the right length for them."""
    with open(path, "rb") as file:
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


class IndexedWriter:
    """Writes a corpus; used as a context manager, it leaves both files whole or none.

    Memory does not grow with the corpus. When the ``with``
    block raises, what the files held before stays.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``; the folder exists.
        dtype: type of the tokens, see :func:`token_dtype`.

    Attributes:
        largest: the largest token so far.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype)
        self._code = {np.dtype(name): code for code, name in DTYPES.items()}[self.dtype]
        self._lines = 0
        self.largest = 0  # token so far
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
        self.largest = max(self.largest, int(tokens.max(initial=0)))

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


__getattr__, _ = names_of(  # fairseq's
    __name__,
    {
        "fairseq.data.block_datasets": """
            IndexedDataset MMapIndexedDataset=IndexedDataset IndexedCachedDataset=IndexedDataset dataset_exists
            get_available_dataset_impl make_dataset
        """,
        "fairseq.data.token_block_utils_fast": """
            MMapIndexedDatasetBuilder IndexedDatasetBuilder=MMapIndexedDatasetBuilder make_builder
            best_fitting_int_dtype data_file_path index_file_path
        """,
    },
)
