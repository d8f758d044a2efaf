"""Checks of a checkpoint file before it is used or written: checksums, sizes, finite weights, room
on the disk."""

from __future__ import annotations

import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fairseq.checkpoint.bounds import UnboundedPickle, check_tuples
from fairseq.distributed.tensor_part import TensorPart
from fairseq.errors import UserError

PLACEHOLDER = "_float_tensor"
"""Last part of the name of a buffer that only marks the device."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of the older format: magic number, protocol, system, content, names of the tensors.
_PICKLES = 5
# Of archives: the long end record and its locator, and the short end record.
_ENDS = ("<4sQ2H2L4Q4sLQL", "<4s4H2LH")
_UNKNOWN = 0xFFFFFFFF
MARGIN = 1 << 20
"""Bytes of a checkpoint beside its tensors, roughly."""


def check_older_format(content: BinaryIO, path: str | Path, size: int) -> None:
    """Check the pickles before the tensors in a file
    of ``torch.save``'s older format, of *size* bytes.

    Raises:
        UserError: a tuple is unbounded, or the tensors are larger than the file; other faults are
            left to the reader.
    """
    elements = 0
    try:
        for _ in range(_PICKLES):
            elements += check_tuples(content)
            # Each takes a byte at least.
            if elements > size:
                raise UnboundedPickle("its tensors are larger than the file")
    except UnboundedPickle as error:
        raise UserError(f"{path}: not a checkpoint ({error}); use another checkpoint") from None
    except ValueError:
        return


def check_archive(content: BinaryIO, path: str | Path, size: int) -> None:
    """Compare every record of an archive of ``torch.save``,
    one a tensor, with its checksum; reads it once.

    *content* has *size* bytes, and is called *path* in messages.

    Raises:
        UserError: a record is damaged, or is compressed, which ``torch.save`` never does and which
            could expand without bound, as can tuples. Or torch could read another record than the
            one that is checked.
    """
    try:
        _check_directory(content)
        with zipfile.ZipFile(content) as archive:
            records = archive.infolist()
            # As torch compares them, which ignores their case; `filename` may be of a field that
            # torch does not read.
            names = [record.orig_filename.lower() for record in records]
            # Declared sizes are checked before any record is read.
            total = sum(record.file_size for record in records)
            if total > size or any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise UserError(
                    f"{path}: rejected: its records expand, which torch.save never writes; use another file"
                )
            if len(set(names)) < len(names):
                raise UserError(f"{path}: rejected: two of its records have one name; use another file")
            _check_records(archive, records)
            for name, record in zip(names, records, strict=True):
                if name.endswith("data.pkl"):
                    with archive.open(record) as pickled:
                        check_tuples(pickled)
    except UnboundedPickle as error:
        raise UserError(f"{path}: not a checkpoint ({error}); use another checkpoint") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{path}: cannot be read as a checkpoint: truncated or damaged ({reason}); use another checkpoint"
        ) from None


def _check_records(archive: zipfile.ZipFile, records: Sequence[zipfile.ZipInfo]) -> None:
    """Compare each record with its checksum, in a thread
    for each core: zlib computes it outside Python's lock."""

    def check(record: zipfile.ZipInfo) -> None:
        with archive.open(record) as stored:
            # At its end, zipfile compares the checksum.
            while stored.read(1 << 20):
                pass

    try:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, len(records), 8)) as pool:
            # The first fault is raised.
            for _ in pool.map(check, records):
                pass
    except RuntimeError:  # no thread can be started
        for record in records:
            check(record)


def _check_directory(content: BinaryIO) -> None:
    """Raise ValueError unless the directory of an archive ends where its end record begins.

    torch finds the directory by its offset, zipfile
    by its length: otherwise each could read another one.
    """
    content.seek(max(0, content.seek(0, os.SEEK_END) - sum(map(struct.calcsize, _ENDS))))
    first, tail = content.tell(), content.read()
    long, short = (struct.calcsize(layout) for layout in _ENDS)
    if len(tail) < short:
        raise ValueError("it is cut off")
    mark, *_, length, offset, comment = struct.unpack(_ENDS[1], tail[-short:])
    end = first + len(tail) - short
    if tail[:4] == b"PK\6\6" and tail[56:60] == b"PK\6\7":
        (_, *_, long_length, long_offset, _, _, position, _) = struct.unpack(_ENDS[0], tail[:long])
        end = first
        # Of archives beyond 4 GiB the short record has no numbers.
        if position != end or (length, offset) != (min(long_length, _UNKNOWN), min(long_offset, _UNKNOWN)):
            raise ValueError("its end records differ")
        length, offset = long_length, long_offset
    if mark != b"PK\5\6" or comment or offset + length != end:
        raise ValueError("its directory is not before its end record")


def tensors(state: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in *state*, a tree of dicts, lists and objects, with its path; a repeated part
    is visited once."""
    stack, visited = [("", state)], set()
    while stack:
        name, value = stack.pop()
        if isinstance(value, Tensor):
            yield name, value
        elif id(value) not in visited:
            visited.add(id(value))
            inner = value.items() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).items()
            inner = enumerate(value) if isinstance(value, list | tuple) else inner
            stack += [(f"{name}.{key!s:.60}".lstrip("."), item) for key, item in inner]


def check_tensors(state: object, path: str | Path) -> None:
    """Check that every tensor in *state* is dense and stored in full.

    A view that repeats what is stored takes no room in a file and all of it in a computation.

    Raises:
        UserError: one is not; the message names its path in *state*.
    """
    for name, value in tensors(state):
        dense = value.layout == torch.strided and not (value.is_meta or value.is_nested or value.is_quantized)
        if not dense or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise UserError(f"{path}: {name} is not a dense tensor that the file holds; use another checkpoint")


def check_finite(parameters: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise UserError if a weight is infinite or NaN;
    placeholders may be, which fairseq leaves uninitialised."""
    for name, value in parameters.items():
        if name.rpartition(".")[2] == PLACEHOLDER:
            continue
        value = value.local if isinstance(value, TensorPart) else value
        if value.dtype in FLOATS and value.numel() and not _is_finite(value):
            raise UserError(f"{path}: weights of {name} are infinite or NaN; use an earlier checkpoint")


def _is_finite(value: Tensor) -> bool:
    low, high = torch.aminmax(value.detach())  # without a copy; NaN propagates
    return bool(torch.isfinite(low) & torch.isfinite(high))


def check_room(path: str | Path, state: Mapping[str, object], more: int = 0) -> None:
    """Raise UserError if the disk of *path* has no room
    for the tensors of *state* and *more* bytes."""
    # torch.save writes a storage once, however many tensors are views of it.
    storages = {
        (tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage().nbytes()
        for _, tensor in tensors(state)
    }
    needed = sum(storages.values()) + MARGIN + more
    try:
        free = shutil.disk_usage(Path(path).parent).free
    except OSError:
        # The folder is missing: opening the file raises the error for it.
        return
    if free < needed:
        raise UserError(
            f"{path}: cannot be written: needs {needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free; "
            "free some space or choose another `save_dir`"
        )
