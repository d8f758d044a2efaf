"""Checkpoints of sharded training: a folder that all processes write with
PyTorch's distributed checkpoint.

``plain.pt`` holds everything but sharded tensors, and the places of those in the state;
``__R_0.distcp`` what process R held of them; ``.metadata`` where each part lies. The last two are
PyTorch's own format, which its planner reads for any number of processes.

The folder is written under a temporary name and renamed; ``checkpoint_last.pt`` and the other names
are links to it, replaced atomically. With ``--async-save`` everything is copied to the host first;
the next save and the end of the run wait for the writing and report its failure.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fairseq.distributed.tensor_part import TensorPart, rows_of
from fairseq.errors import UserError
from fairseq.system.files import FULL

PLAIN = "plain.pt"
PARTS = "parts"
"""Key in ``plain.pt``: [path in the state, name in ``.metadata``] of each sharded tensor."""
_METADATA = ".metadata"
_DTYPES = {str(dtype).removeprefix("torch.") for dtype in (torch.float32, torch.float16, torch.bfloat16)}
_DATA_CLASSES = {
    "torch": {"Size", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "pathlib": {"PosixPath", "PurePosixPath"},
}
"""Everything that PyTorch's ``.metadata`` names; none of it does anything but hold data."""


def is_folder(path: str | Path) -> bool:
    """Return whether *path* is a checkpoint of sharded training."""
    return (Path(path) / PLAIN).is_file()


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
        dcp.save(dict(parts), storage_writer=dcp.FileSystemWriter(folder), planner=Planner(), process_group=group)
    except CheckpointException as error:
        raise _failure(folder, error.failures) from None
    if dist.get_rank(group) == 0:
        with open(folder / PLAIN, "wb") as file:
            torch.save(dict(plain), file)
            file.flush()
            os.fsync(file.fileno())


def _failure(folder: Path, failures: Mapping[int, Any]) -> BaseException:
    """The error to raise for the *failures* of ranks."""
    # Of several failures the lowest rank's, the same message on all processes.
    rank, (error, _) = min(failures.items())
    if not isinstance(error, OSError):
        return RuntimeError(f"process {rank} could not write its part of {folder}: {error}")
    advice = "free some space or choose another place" if error.errno in FULL else "choose another place"
    return UserError(f"{folder}: cannot be written by process {rank} ({error.strerror or error}); {advice}")


def join(folder: Path, plain: dict[str, Any], rows: tuple[int, int] | None, only: str | None) -> dict[str, Any]:
    """Return the content of the checkpoint in *folder*, whose ``plain.pt`` holds *plain*.

    With *only*, sharded tensors of other parts of the state stay None; with *rows*, (i, n), part i
    of n of each tensor is read, as :class:`TensorPart`. A damaged folder may raise anything.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class Reader(dcp.FileSystemReader):
        """Reads the metadata within the allow-list; PyTorch's would run what a pickle names."""

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            metadata = read_metadata(folder)
            metadata.storage_meta.load_id = self.load_id
            return metadata

    class Planner(dcp.DefaultLoadPlanner):
        """Reads rows of tensors where PyTorch expects tensors of its own."""

        def create_local_plan(self) -> dcp.LoadPlan:
            chunks = {key: target.chunks() for key, target in targets.items()}
            plans = (create_read_items_for_chunk_list(key, stored[key], chunks[key]) for key in chunks)
            return dcp.LoadPlan([item for plan in plans for item in plan])

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return targets[index.fqn].local

    stored = read_metadata(folder).state_dict_metadata
    targets: dict[str, TensorPart] = {}
    plain.pop("manifest", None)  # of version 1.0
    for path, key in plain.pop(PARTS):
        if only not in (None, path[0]):
            continue
        if key not in targets:
            shape, dtype = stored[key].size, stored[key].properties.dtype
            first, end = rows_of(shape[0], *(rows or (0, 1)))
            targets[key] = TensorPart(torch.empty((end - first, *shape[1:]), dtype=dtype), first, shape)
        holder: Any = plain
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = targets[key].local if rows is None else targets[key]
    try:
        dcp.load({}, storage_reader=Reader(folder), planner=Planner(), no_dist=True)
    # No Exception: it would pass through whoever catches those.
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
    return plain


def read_metadata(folder: Path) -> Any:
    """Return PyTorch's ``.metadata`` of a checkpoint; UnpicklingError if it names anything that
    does more than hold data."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name in _DATA_CLASSES.get(module, ()):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"{_METADATA} names {module}.{name}")

    with open(folder / _METADATA, "rb") as file:
        return Unpickler(file).load()


def damaged_part(folder: Path) -> str | None:
    """Return the name of a file of *folder* with a tensor that differs from its checksum, None if
    all are sound."""
    for stored in read_metadata(folder).storage_data.values():
        with open(folder / stored.relative_path, "rb") as file:
            file.seek(stored.offset)
            archive = io.BytesIO(file.read(stored.length))
        if zipfile.ZipFile(archive).testzip() is not None:
            return str(stored.relative_path)
    return None
