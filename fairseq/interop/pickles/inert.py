"""Safe reader for pickles: no name is imported and no code of the file is executed.

A module saved with ``torch.save`` refers to its classes by name. Python's unpickler reads it here
with ``find_class`` of our own: an unknown class becomes an empty subclass of :class:`Inert`, whose
objects keep their attributes and which cannot be called; the few functions that models need are in
:data:`CALLS`.
"""

from __future__ import annotations

import functools
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fairseq.errors import UserError, read_failure
from fairseq.interop.pickles.named_tensors import Storage, Stored

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # first pickle of a file in the format before PyTorch 1.6
DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Refused(Exception):
    """A pickle contains a call that is not allowed."""


class _Name(type):
    """A class of a pickle, which stands for its name alone: to call it is an error."""

    path: str  # module.name

    def __call__(cls, *args: object, **kwargs: object) -> None:
        raise Refused(cls.path)


class Inert(metaclass=_Name):
    """An object of an unknown class; items of a list or a mapping of such a class are not kept."""

    path: str  # the class, ``module.name``
    state: dict[Any, Any]  # its attributes

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        made = object.__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: object) -> None:
        # With `__slots__` the state is a pair of two mappings; both are attributes.
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.state.update(part)

    def append(self, item: object) -> None:
        """Drop an item of a list."""

    extend = add = append

    def __setitem__(self, key: object, item: object) -> None:
        """Drop an item of a mapping."""


def _tensor(storage: Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: object) -> Stored:
    if not isinstance(storage, Storage):
        raise ValueError("tensor without data")
    return Stored(storage, offset, size, stride)


CALLS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "collections.OrderedDict": OrderedDict,  # of torch, with an attribute
    "collections.Counter": dict,
    # `re._compile` makes patterns of tokenizers.
    **dict.fromkeys(("collections.defaultdict", "re._compile", "torch.device"), lambda *content: {}),
    **dict.fromkeys(("builtins.set", "__builtin__.set"), list),
    **dict.fromkeys(("copyreg._reconstructor", "copy_reg._reconstructor"), lambda cls, *rest: Inert.__new__(cls)),
}


class _Unpickler(pickle.Unpickler):
    """Reader of one pickle at the position of *file*."""

    def __init__(self, file: BinaryIO | io.BytesIO) -> None:
        super().__init__(file, encoding="latin-1")
        self.storages: set[Storage] = set()  # descriptions of tensor data outside the pickle

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        # New objects each time: a pickle may set attributes of what it names.
        return functools.partial(CALLS[path]) if path in CALLS else _Name(name, (Inert,), {"path": path})

    def persistent_load(self, reference: Any) -> Any:
        kind, what, *rest = reference
        # The old format stored classes with their source code, which is not needed.
        if kind == "module":
            return what
        # ("storage", class, key, device, count). A sixth entry, in the format before 1.6, makes
        # the storage a slice of another one; torch writes None there today.
        key, _, count, *view = rest
        if kind != "storage" or any(view):
            raise ValueError("unknown type of tensor")
        storage = Storage(str(key), DTYPES[what.path.rpartition(".")[2]], int(count))
        self.storages.add(storage)
        return storage


@dataclass(frozen=True)
class Loaded:
    """Content of a file."""

    path: Path
    root: Any  # plain data, :class:`Inert` objects and :class:`Stored` tensors
    numbers: dict[str, bytearray]  # bytes of each storage, by key

    def tensor(self, stored: Stored) -> Tensor:
        """Return the tensor, in the memory of its storage;
        UserError if PyTorch rejects its shape or strides."""
        try:
            # `frombuffer` rejects an empty buffer, which is what a tensor without items has; one
            # number stands in for it.
            flat = torch.frombuffer(self.numbers[stored.storage.key] or bytearray(8), dtype=stored.storage.dtype)
            return flat.as_strided(stored.size, stored.stride, stored.offset)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{self.path}: invalid tensor ({_line(error)}); use another file") from None


def load(path: Path) -> Loaded:
    """Read a file of ``torch.save`` (either format) or a plain pickle.

    Raises:
        UserError: it cannot be read, is damaged, or contains a call that is not allowed.
    """
    try:
        with open(path, "rb") as file:
            return Loaded(path, *(_load_zip(file) if file.peek(2).startswith(b"PK") else _load_pickles(file)))
    except Refused as refused:
        raise UserError(
            f"{path}: rejected: the pickle contains {_line(refused)}, which models do not need and which could run "
            "code; nothing was executed; use a file from a source you trust"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {read_failure(error)}; check the path and its permissions") from None
    # Damaged and hostile files raise errors of any type.
    except Exception as error:
        raise UserError(
            f"{path}: cannot be read: truncated, damaged or in another format "
            f"({type(error).__name__}: {_line(error)}); use another file"
        ) from None


def _line(error: Exception) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in str(error)[:120])


Content = tuple[Any, dict[str, bytearray]]  # root object, bytes of each storage


def _load_zip(file: BinaryIO) -> Content:
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("not an archive of torch.save")
        folder = names[0].removesuffix("data.pkl")
        # Older versions of torch wrote no such entry; nearly every machine is little-endian.
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("big-endian data")
        unpickler = _Unpickler(io.BytesIO(archive.read(names[0])))
        root = unpickler.load()
        # Only what the pickle refers to is read; an archive may have further entries.
        keys = {storage.key for storage in unpickler.storages}
        return _complete(root, unpickler, {key: bytearray(archive.read(f"{folder}data/{key}")) for key in keys})


def _load_pickles(file: BinaryIO) -> Content:
    """The format before torch 1.6 (magic number, version,
    system, content, storages), or one plain pickle."""
    unpickler = _Unpickler(file)
    root = unpickler.load()
    if root != LEGACY_MAGIC:
        return _complete(root, unpickler, {})
    _, _, unpickler = _Unpickler(file).load(), _Unpickler(file).load(), _Unpickler(file)
    root, keys = unpickler.load(), _Unpickler(file).load()
    kinds = {storage.key: storage for storage in unpickler.storages}
    numbers = {}
    for key in keys:
        # Each storage begins with its number of items as 8 bytes.
        if int.from_bytes(file.read(8), "little") != kinds[key].count:
            raise ValueError("data without a tensor")
        numbers[key] = bytearray(file.read(kinds[key].nbytes))
    return _complete(root, unpickler, numbers)


def _complete(root: object, unpickler: _Unpickler, numbers: dict[str, bytearray]) -> Content:
    if any(len(numbers.get(storage.key, b"")) != storage.nbytes for storage in unpickler.storages):
        raise ValueError("tensor data truncated")
    return root, numbers
