"""One checkpoint file: written atomically, read without executing anything in it.

The layout is fairseq 0.x's with plain values, the optimizer's state by parameter name. Everything
that a run needs to go on exactly is inside: model, optimizer, schedule, loss scale, random states,
carried state, position in the data, the log's sums, the best metrics, and a digest of the
dictionary. A file is written under another name in the same folder, flushed to the disk, and
renamed; it is loaded with ``weights_only=True`` and an allow-list.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fairseq.checkpoint import former_layouts, parts, schema
from fairseq.checkpoint.bounds import check_bounded
from fairseq.checkpoint.integrity import (
    FLOATS,
    check_archive,
    check_finite,
    check_older_format,
    check_room,
    check_tensors,
)
from fairseq.checkpoint.standins import SAFE_GLOBALS
from fairseq.distributed.tensor_part import TensorPart
from fairseq.errors import UserError, first_of, read_failure
from fairseq.system.files import ARCHIVE, atomic_file

_REFUSED = re.compile(r"GLOBAL ([\w.<>\-]+)(?: was not an allowed global| whose module)")


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write *state* to *path*, atomically: at every instant
    the file is the old one or the new one, complete.

    The room on the disk is checked before. Tensors on a device are copied to the host, the
    optimizer's one at a time while they are written.

    Raises:
        UserError: the folder is missing, the disk is too full,
            or the like; the old file is unchanged.
    """
    check_room(path, state)
    # The optimizer's state is the largest part: torch.save copies its tensors one at a time.
    others = {key: value for key, value in state.items() if key != "last_optimizer_state"}
    with atomic_file(path) as file:
        torch.save({**state, **copied(others, again=False)}, file)


def copied(value: object, *, again: bool = True) -> Any:
    """Return *value*, a tree of dicts and lists,
    with its tensors on the host; a tied one is copied once.

    With *again* also those that are on the host already are copied.
    """
    copies: dict[object, object] = {}

    def copy(item: object) -> Any:
        if isinstance(item, TensorPart):
            if id(item) not in copies:
                copies[id(item)] = item.copied(again)
            return copies[id(item)]
        if isinstance(item, Tensor):
            # One tensor under several names stays one;
            # a square matrix and its transpose differ by strides only.
            view = (item.data_ptr(), item.shape, item.stride(), item.dtype)
            if view not in copies:
                copies[view] = item.detach().to("cpu", copy=True) if again else item.detach().cpu()
            return copies[view]
        if isinstance(item, dict):
            return {key: copy(inner) for key, inner in item.items()}
        return [copy(inner) for inner in item] if isinstance(item, list) else item

    return copy(value)


def load(path: str | Path, map_location: Any = "cpu", rows: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the checkpoint at *path* in the current layout, whichever fairseq 0.x wrote it.

    The parts in a folder that sharded training saved are put together; with *rows*, (i, n), part i
    of n of each sharded tensor is read, as :class:`~fairseq.checkpoint.parts.TensorPart`.

    Returns:
        ``args`` (a plain dict), ``model`` (parameters by name), ``optimizer_history``,
        ``last_optimizer_state``, ``extra_state``, and whatever else the file holds.

    Raises:
        UserError: the file is missing, damaged, hostile, or not a checkpoint, or has weights that
            are not finite.
    """
    state = read(path, map_location, rows)
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor | TensorPart) for name, value in model.items()
    ):
        raise UserError(f"{path}: not a checkpoint (it holds no 'model'); give a file that training saved")
    if not any(isinstance(state.get(key), dict) or hasattr(state.get(key), "__dict__") for key in ("args", "cfg")):
        raise UserError(f"{path}: not a checkpoint (it holds no 'args'); give a file that training saved")
    # Before the upgrade, which relies on the types.
    schema.check(state, path)
    check_finite(model, path)
    return former_layouts.upgrade(state)


def read(path: str | Path, map_location: object = "cpu", rows: tuple[int, int] | None = None) -> Any:
    """Return the tensors and plain data in a file
    of ``torch.save``, of the zip format or the older one.

    Memory-mapped where the format allows it: nothing is copied until it is used. The zip format has
    a checksum a tensor, which is verified.

    Raises:
        UserError: the file is missing, empty, truncated, names something that no checkpoint needs,
            or has tensors that it does not hold.
    """
    while parts.is_folder(path):
        # Once: while it is read, training may give a link another target and remove this one.
        folder = Path(os.path.realpath(path))
        try:
            return parts.join(folder, read(folder / parts.PLAIN), rows)
        except UserError:
            if parts.is_folder(folder):
                raise
            if os.path.realpath(path) == str(folder):
                raise _removed(path) from None
    with _opened(path) as file:
        return _read_file(file, path, map_location)


def _read_file(file: BinaryIO, path: str | Path, map_location: Any) -> Any:
    """The content of an open *file*, called *path* in messages."""
    check = check_archive if (is_archive := _is_archive(file, path)) else check_older_format
    check(file, path, os.fstat(file.fileno()).st_size)
    # What was checked is read, also where the name has been given to another file, or is not UTF-8.
    name = f"/dev/fd/{file.fileno()}"
    try:
        # For this file only: what other code allows, or does not, stays as it is.
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)), warnings.catch_warnings():
            # What torch warns of is reported below.
            warnings.simplefilter("ignore")
            state = torch.load(
                name if os.path.exists(name) else str(path), map_location, weights_only=True, mmap=is_archive
            )
    # Damaged and hostile files fail in every way there is.
    except Exception as error:
        raise UserError(f"{path}: {_fault(error)}") from None
    check_bounded(state, path)
    check_tensors(state, path)
    return state


def describe_mismatch(
    model_state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: str | Path
) -> str | None:
    """Name the parameters of the checkpoint at *path*
    that do not fit a model, in one line; None if all do."""
    reshaped = [
        f"{name} {list(model_state[name].shape)} for {list(expected[name].shape)}"
        for name in expected
        if name in model_state and model_state[name].shape != expected[name].shape
    ]
    differences = {
        "missing": [name for name in expected if name not in model_state],
        "unexpected": [name for name in model_state if name not in expected],
        "of another shape": reshaped,
        "of another type": [
            f"{name} {_type(model_state[name])}"
            for name in expected
            if name in model_state and (_type(model_state[name]) in FLOATS) != (_type(expected[name]) in FLOATS)
        ],
    }
    parts = [f"{len(names)} {kind} ({first_of(names)})" for kind, names in differences.items() if names]
    if not parts:
        return None
    return (
        f"{path}: does not fit this model: parameters {', '.join(parts)}; use the `arch` and sizes it was trained with"
    )


def _type(value: Tensor | TensorPart) -> torch.dtype:
    return value.local.dtype if isinstance(value, TensorPart) else value.dtype


def _opened(path: str | Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise UserError(f"{path}: file not found; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name a checkpoint file in it") from None
    except OSError as error:
        raise UserError(f"{path}: {read_failure(error)}; check the path and its permissions") from None


def _is_archive(file: BinaryIO, path: str | Path) -> bool:
    try:
        magic = file.read(len(ARCHIVE))
        file.seek(0)
    except OSError as error:
        raise UserError(f"{path}: {read_failure(error)}; check the path and its permissions") from None
    if not magic:
        raise UserError(f"{path}: is empty; use another checkpoint")
    return magic == ARCHIVE


def _removed(path: str | Path) -> UserError:
    return UserError(f"{path}: was removed while it was read; use a checkpoint that training keeps")


def _fault(error: Exception) -> str:
    refused = _REFUSED.search(str(error))
    if refused:
        return (
            f"rejected: the pickle contains {refused[1]}, which checkpoints do not need and which could run code; "
            "nothing was executed; use a checkpoint from a source you trust"
        )
    detail = str(error).rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    reason = " ".join(detail.split())[:120]
    return (
        f"cannot be read as a checkpoint: truncated, damaged or in another format ({type(error).__name__}: {reason}); "
        "use another checkpoint"
    )
