"""Checkpoints of sharded training: a folder that all
processes write with PyTorch's distributed checkpoint.

``plain.pt`` holds everything but sharded tensors, ``__R_0.distcp`` the parts that process R held,
and ``manifest.json`` their positions. Each part is an archive with a checksum. PyTorch's
``.metadata``, a pickle, is there for PyTorch's tools and never read here.

The folder is written under a temporary name and renamed; ``checkpoint_last.pt``
and the other names are links to it, replaced atomically. Reading checks every bound and checksum,
and gives whole tensors, or to a process of sharded training only its rows.
With ``--async-save`` everything is copied to the host first; the next save
and the end of the run wait for the writing and report its failure.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fairseq.checkpoint.integrity import check_archive
from fairseq.distributed.tensor_part import MANIFEST, TensorPart, rows_of
from fairseq.errors import UserError
from fairseq.system.files import FULL
from fairseq.system.json_files import parse_json

PLAIN = "plain.pt"
PARTS = "parts"
"""Key in ``plain.pt``: [path in the state, key in the manifest] of each sharded tensor."""
_LARGEST_MANIFEST = 1 << 28
_FILE = re.compile(r"__\d+_\d+\.distcp")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def split(state: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, TensorPart]]:
    """Return *state* without its :class:`TensorPart` values,
    and those by key; equal keys on all processes."""
    keys: dict[int, str] = {}
    parts: dict[str, TensorPart] = {}
    paths: list[Any] = []

    def strip(value: object, path: tuple[object, ...]) -> Any:
        if isinstance(value, TensorPart):
            # A tied tensor is stored once.
            key = keys.setdefault(id(value), "/".join(map(str, path)))
            parts[key] = value
            paths.append([list(path), key])
            return None
        if isinstance(value, dict):
            return {name: strip(item, (*path, name)) for name, item in value.items()}
        return [strip(item, (*path, i)) for i, item in enumerate(value)] if isinstance(value, list) else value

    plain = strip(dict(state), ())
    return {**plain, PARTS: paths}, parts


def write(folder: Path, plain: Mapping[str, object], parts: dict[str, TensorPart], group: dist.ProcessGroup) -> None:
    """Write *parts* into *folder*; to be called by every
    process of *group*, whose first writes *plain*, too.

    A process that cannot write its parts is a UserError of all.
    """
    # Imported here: it takes a second, and only sharded runs write with it.
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    class Planner(dcp.DefaultSavePlanner):
        """Writes the rows of a part where PyTorch expects tensors of its own; copies of one part
        are written once."""

        def lookup_object(self, index: Any) -> Any:
            return parts[index.fqn].local.detach()

    try:
        metadata = dcp.save(
            dict(parts), storage_writer=dcp.FileSystemWriter(folder), planner=Planner(), process_group=group
        )
    except CheckpointException as error:
        raise _failure(folder, error.failures) from None
    if dist.get_rank(group) == 0:
        manifest = _manifest(metadata)
        with open(folder / MANIFEST, "wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        # Last, with the checksum of the manifest: parts of two saves are never taken for one.
        with open(folder / PLAIN, "wb") as file:
            torch.save({**plain, "manifest": zlib.crc32(manifest)}, file)
            file.flush()
            os.fsync(file.fileno())


def _manifest(metadata: Any) -> bytes:
    """The tensors in PyTorch's *metadata*, and where their parts lie, in JSON, which reading needs
    no pickle for."""
    tensors: dict[str, Any] = {}
    rows: dict[object, int] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "chunks": []}
        rows |= {(name, chunk.offsets): chunk.sizes[0] for chunk in tensor.chunks}
    for index, stored in metadata.storage_data.items():
        key = index.fqn, index.offset
        chunk = [index.offset[0], rows[key], stored.relative_path, stored.offset, stored.length]
        tensors[index.fqn]["chunks"].append(chunk)
    return json.dumps({"save_id": metadata.storage_meta.save_id, "tensors": tensors}).encode()


def _failure(folder: Path, failures: Mapping[int, Any]) -> BaseException:
    """The error to raise for the *failures* of ranks."""
    # Of several failures the lowest rank's, the same message on all processes.
    rank, (error, _) = min(failures.items())
    if not isinstance(error, OSError):
        return RuntimeError(f"process {rank} could not write its part of {folder}: {error}")
    advice = "free some space or choose another place" if error.errno in FULL else "choose another place"
    return UserError(f"{folder}: cannot be written by process {rank} ({error.strerror or error}); {advice}")


def is_folder(path: str | Path) -> bool:
    """Return whether *path* is a checkpoint of sharded training."""
    return os.path.isfile(Path(path) / MANIFEST)


def join(folder: Path, plain: dict[str, object], rows: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the content of the checkpoint in *folder*, whose ``plain.pt`` holds *plain*.

    With *rows*, (i, n), part i of n of each sharded tensor is read, as :class:`TensorPart`.

    Raises:
        UserError: a file is missing or damaged, or they do not belong together.
    """
    try:
        return _joined(folder, plain, rows)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OSError, RuntimeError, EOFError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"{folder}: cannot be read as a checkpoint: incomplete or damaged ({type(error).__name__}: {reason}); "
            "use another checkpoint"
        ) from None


def _joined(folder: Path, plain: dict[str, Any], rows: tuple[int, int] | None) -> dict[str, object]:
    if (folder / MANIFEST).stat().st_size > _LARGEST_MANIFEST:
        raise ValueError(f"{MANIFEST} is too large")
    text = (folder / MANIFEST).read_bytes()
    if plain.pop("manifest") != zlib.crc32(text):
        raise ValueError(f"{MANIFEST} does not belong to {PLAIN}")
    stored = parse_json(text)["tensors"]
    # Of a tensor of its own each: in all, the parts are not larger than the files.
    chunks = [Chunk(*chunk) for tensor in stored.values() for chunk in tensor["chunks"]]
    sizes = [(folder / name).stat().st_size for name in {chunk.checked_file for chunk in chunks}]
    if min([chunk.length for chunk in chunks], default=0) < 0 or sum(chunk.length for chunk in chunks) > sum(sizes):
        raise ValueError("the parts are larger than their files")
    tensors: dict[str, Any] = {}
    for path, key in plain.pop(PARTS):
        if key not in tensors:
            # The first of tied paths names the tensor.
            if key != "/".join(map(str, path)):
                raise ValueError(f"{path[-1]} is stored under the name of another tensor")
            tensors[key] = _read(folder, stored[key], rows)
        holder: Any = plain
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = tensors[key]
    return plain


def _read(folder: Path, stored: Mapping[str, Any], rows: tuple[int, int] | None) -> Tensor | TensorPart:
    """Rows of one tensor, from the chunks that have them."""
    shape, dtype = torch.Size(stored["shape"]), _DTYPES[stored["dtype"]]
    chunks = [Chunk(*chunk) for chunk in stored["chunks"]]
    width = math.prod(shape[1:]) * dtype.itemsize
    if min(shape) < 0 or sum(chunk.length for chunk in chunks) < shape[0] * width:
        # Checked before room is made for it.
        raise ValueError("a tensor is larger than its parts")
    first, end = (0, shape[0]) if rows is None else rows_of(shape[0], *rows)
    result = torch.empty((end - first, *shape[1:]), dtype=dtype)
    reached = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.first):
        if chunk.first != reached or chunk.rows < 1:
            raise ValueError("the parts of a tensor overlap or leave rows out")
        reached += chunk.rows
        low, high = max(first, chunk.first), min(end, reached)
        if low < high:
            content = chunk.read(folder)
            if content.shape != (chunk.rows, *shape[1:]) or content.dtype != dtype:
                raise ValueError("a part has another shape or type than its tensor")
            result[low - first : high - first] = content[low - chunk.first : high - chunk.first]
    if reached != shape[0]:
        raise ValueError("the parts of a tensor leave rows out")
    return result if rows is None else TensorPart(result, first, shape)


@dataclass(frozen=True)
class Chunk:
    """Rows of a tensor in a file: an archive of ``torch.save`` of *length* bytes at *start*."""

    first: int
    rows: int
    file: str
    start: int
    length: int

    @property
    def checked_file(self) -> str:
        """The name of the file, which cannot lead out of the folder."""
        if not _FILE.fullmatch(self.file):
            raise ValueError("a part is in a file of another name")
        return self.file

    def read(self, folder: Path) -> Tensor:
        """Return the rows; raise ValueError if the entry
        is invalid, UserError if the archive is damaged."""
        path = folder / self.checked_file
        with open(path, "rb") as file:
            if not 0 <= self.start <= self.start + self.length <= path.stat().st_size:
                raise ValueError(f"{self.file} is truncated")
            file.seek(self.start)
            archive = io.BytesIO(file.read(self.length))
        # Before torch.load builds anything from it.
        check_archive(archive, path, self.length)
        archive.seek(0)
        try:
            content = torch.load(archive, weights_only=True)
        # Hostile files fail in every way there is; torch's advice is to run what they hold.
        except Exception as error:
            raise ValueError(f"a part is not a tensor ({type(error).__name__})") from None
        if not isinstance(content, Tensor):
            raise ValueError("a part is not a tensor")
        return content
