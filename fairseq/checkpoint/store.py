"""One checkpoint file: written atomically, read without executing anything in it.

The layout is fairseq 0.x's with plain values, the optimizer's state by parameter name. Everything
that a run needs to go on exactly is inside: model, optimizer, schedule, loss scale, random states,
carried state, position in the data, the log's sums, the best metrics, and a digest of the
dictionary. A file is written under another name in the same folder, flushed to the disk, and
renamed; it is mapped into memory with ``weights_only=True`` and an allow-list, so that a command
reads what it uses. Checksums are compared where a run goes on from a file: :func:`verify`.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.checkpoint import former_layouts, sharded
from fairseq.checkpoint.standins import SAFE_GLOBALS
from fairseq.config.settings import without_paths
from fairseq.distributed.tensor_part import TensorPart
from fairseq.errors import UserError, first_of, read_failure
from fairseq.modules import devices
from fairseq.system.files import atomic_file

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_REFUSED = re.compile(r"GLOBAL ([\w.<>\-]+)(?: was not an allowed global| whose module)")


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write *state* to *path*, atomically: at every instant
    the file is the old one or the new one, complete.

    Tensors on a device are copied to the host, the
    optimizer's one at a time while they are written.

    Raises:
        UserError: the folder is missing, the disk is too full,
            or the like; the old file is unchanged.
    """
    # The optimizer's state is the largest part: torch.save copies its tensors one at a time.
    others = {key: value for key, value in state.items() if key != "last_optimizer_state"}
    with atomic_file(path) as file:
        torch.save({**state, **copied(others, again=False)}, file)


def copied(value: object, *, again: bool = True) -> Any:
    """Return *value*, a tree of dicts and lists,
    with its tensors on the host; a tied one is copied once.

    With *again* also those that are on the host already are copied, and those of a device at once,
    into pinned memory.
    """
    copies: dict[object, object] = {}
    sources: set[torch.device] = set()

    def staged(tensor: Tensor) -> Tensor:
        if not again:
            return tensor.detach().cpu()
        if not devices.is_accelerator(tensor.device):
            return tensor.detach().to("cpu", copy=True)
        sources.add(tensor.device)
        # Pageable memory would be copied in pieces, each of which waits for the device.
        return devices.host_memory(tensor).copy_(tensor.detach(), non_blocking=True)

    def copy(item: object) -> Any:
        if isinstance(item, TensorPart):
            if id(item) not in copies:
                copies[id(item)] = TensorPart(staged(item.local), item.first, item.shape)
            return copies[id(item)]
        if isinstance(item, Tensor):
            # One tensor under several names stays one;
            # a square matrix and its transpose differ by strides only.
            view = (item.data_ptr(), item.shape, item.stride(), item.dtype)
            if view not in copies:
                copies[view] = staged(item)
            return copies[view]
        if isinstance(item, dict):
            return {key: copy(inner) for key, inner in item.items()}
        return [copy(inner) for inner in item] if isinstance(item, list) else item

    result = copy(value)
    for device in sources:
        devices.synchronize(device)  # the copies have ended
    return result


def load(path: str | Path, rows: tuple[int, int] | None = None, only: str | None = None) -> dict[str, Any]:
    """Return the checkpoint at *path* in the current layout, whichever fairseq 0.x wrote it.

    Args:
        rows: (i, n): of each tensor that sharded training saved in parts, read part i of n, as
            :class:`~fairseq.distributed.tensor_part.TensorPart`; None: put them together.
        only: the part of the state that is used, such as ``model``: what sharded training saved of
            others is not read. Files are mapped, so that what is not used is not read anyway.

    Returns:
        ``args`` (a plain dict), ``model`` (parameters by name), ``optimizer_history``,
        ``last_optimizer_state``, ``extra_state``, and whatever else the file holds.

    Raises:
        UserError: the file is missing, cut off, not a checkpoint, or names what could run code.
    """
    state = read(path, rows, only)
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor | TensorPart) for name, value in model.items()
    ):
        raise UserError(f"{path}: not a checkpoint (it holds no 'model'); give a file that training saved")
    if not any(isinstance(state.get(key), Mapping) for key in ("args", "cfg")):
        raise UserError(f"{path}: not a checkpoint (it holds no 'args'); give a file that training saved")
    with _as_user_error(path):
        upgraded: dict[str, Any] = former_layouts.upgrade(state)
        return {**upgraded, "args": without_paths(upgraded["args"], path)}


def read(path: str | Path, rows: tuple[int, int] | None = None, only: str | None = None) -> Any:
    """Return the tensors and plain data in a file
    of ``torch.save``, of the zip format or the older one, or in a folder of sharded training.

    The zip format is mapped into memory: nothing is read until it is used.

    Raises:
        UserError: the file is missing, empty,
            truncated, or names something that no checkpoint needs.
    """
    with _as_user_error(path), warnings.catch_warnings():
        # What torch warns of is reported as an error.
        warnings.simplefilter("ignore")
        if sharded.is_folder(path):
            # Training may give a link another target meanwhile.
            folder = Path(path).resolve()
            return sharded.join(folder, read(folder / sharded.PLAIN), rows, only)
        # For this file only: what other code allows, or does not, stays as it is.
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
            return torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def verify(path: str | Path) -> None:
    """Compare every tensor of the checkpoint at *path* with the checksum that the zip format has
    for it; the older format has none.

    Raises:
        UserError: one differs, or the file cannot be read.
    """
    with _as_user_error(path):
        if sharded.is_folder(path):
            verify(Path(path) / sharded.PLAIN)
            damaged = sharded.damaged_part(Path(path))
        elif zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        else:
            return
    if damaged is not None:
        raise UserError(f"{path}: is damaged: {damaged} differs from its checksum; use another checkpoint")


@contextlib.contextmanager
def _as_user_error(path: str | Path) -> Iterator[None]:
    """Turn whatever reading the checkpoint at *path* raises into a UserError: damaged and hostile
    files fail in every way there is."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: file not found; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name a checkpoint file in it") from None
    except PermissionError as error:
        raise UserError(f"{path}: {read_failure(error)}; check the path and its permissions") from None
    except Exception as error:
        raise UserError(f"{path}: {_fault(path, error)}") from None


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


def _begins_as_zip(path: str | Path) -> bool:
    if not Path(path).is_file():
        return False
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _fault(path: str | Path, error: Exception) -> str:
    refused = _REFUSED.search(str(error))
    if refused:
        return (
            f"rejected: the pickle contains {refused[1]}, which checkpoints do not need and which could run code; "
            "nothing was executed; use a checkpoint from a source you trust"
        )
    if Path(path).is_file() and Path(path).stat().st_size == 0:
        return "is empty; use another checkpoint"
    # A zip's index is at its end.
    if _begins_as_zip(path) and not zipfile.is_zipfile(path):
        return "is truncated: its end is missing; copy it again, or use another checkpoint"
    detail = str(error).rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    reason = " ".join(detail.split())[:120]
    return (
        f"cannot be read as a checkpoint: truncated, damaged or in another format ({type(error).__name__}: {reason}); "
        "use another checkpoint"
    )
