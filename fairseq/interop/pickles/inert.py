"""Safe reader for pickles: no name is imported and no code of the file is executed.

A module saved with ``torch.save`` refers to its classes by name. This reader interprets the pickle
opcodes: names stay text, objects of unknown classes become :class:`Inert` with their state, and
calls are rejected except those in :data:`CALLS`, which have implementations here.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fairseq.errors import UserError, read_failure
from fairseq.interop.pickles.named_tensors import NAME_LENGTH, Storage, Stored

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


@dataclass(frozen=True)
class Name:
    """A global of a pickle, ``module.name``, as text."""

    path: str

    @classmethod
    def of(cls, argument: str) -> Name:
        """Return the name that an opcode gives as ``module name``."""
        return cls(argument.replace(" ", ".", 1))


@dataclass(eq=False, repr=False)
class Inert:
    """An object of an unknown class; items of a list or a mapping of such a class are not kept."""

    path: str  # the class, ``module.name``
    state: dict[Any, Any] = field(default_factory=dict)  # its attributes


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: object) -> Stored:
    if not isinstance(storage, Storage) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise ValueError("invalid tensor")
    return Stored(storage, offset, size, stride)


def _mapping(content: Any = (), *rest: object) -> dict[object, object]:
    return _keyed(content.items() if isinstance(content, dict) else content)


CALLS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    # `re._compile` makes patterns of tokenizers.
    **dict.fromkeys(("collections.defaultdict", "re._compile", "torch.device"), lambda *content: {}),
    **dict.fromkeys(("builtins.set", "__builtin__.set"), list),  # hashing nested tuples would recurse
    **dict.fromkeys(("copyreg._reconstructor", "copy_reg._reconstructor"), lambda cls, *rest: Inert(cls.path)),
}


class _Machine:
    """Interpreter of one pickle; opcodes other
    than :data:`LITERALS` and :data:`OPERATIONS` are rejected."""

    def __init__(self) -> None:
        self.storages: set[Storage] = set()  # descriptions of tensor data outside the pickle
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self, file: Any) -> Any:
        """Read the pickle at the position of *file*, and leave *file* after it."""
        for code, argument, _ in pickletools.genops(file):
            if code.name == "STOP":
                return self.stack.pop()
            if code.name in LITERALS:
                self.push(argument)
            elif code.name in OPERATIONS:
                OPERATIONS[code.name](self, argument)
            elif code.name not in ("PROTO", "FRAME"):
                raise Refused(f"the opcode {code.name}")
        raise ValueError("no STOP opcode")

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("stack underflow")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def since_mark(self) -> list[object]:
        return self.pop(len(self.stack) - self.marks.pop())

    def name_of_two(self, _: object) -> None:
        parts = self.pop(2)
        if not all(isinstance(part, str) and len(part) <= NAME_LENGTH for part in parts):
            raise ValueError("invalid name")
        self.push(Name(".".join(parts)))

    def call(self, name: object, arguments: object) -> None:
        if not isinstance(name, Name) or not isinstance(arguments, tuple | list):
            raise ValueError("invalid call")
        if name.path not in CALLS:
            raise Refused(name.path)
        self.push(CALLS[name.path](*arguments))

    def instantiate(self, arguments: list[object]) -> None:
        name, values, *_ = arguments
        if not isinstance(name, Name):
            raise ValueError("invalid class")
        if name.path in CALLS:
            self.call(name, values)
        else:
            self.push(Inert(name.path))

    def build(self, _: object) -> None:
        (state,) = self.pop(1)
        parts = state if isinstance(state, tuple) else (state,)
        if isinstance(self.stack[-1], Inert):
            for part in parts:
                if isinstance(part, dict):
                    # With `__slots__` the state is a pair of two mappings; both are attributes.
                    self.stack[-1].state.update(part)

    def extend(self, values: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1] += values
        elif not isinstance(self.stack[-1], Inert):
            raise ValueError("items appended to an object that is not a list")

    def assign(self, values: list[object]) -> None:
        pairs = _pairs(values)
        if isinstance(self.stack[-1], dict):
            self.stack[-1].update(pairs)
        elif not isinstance(self.stack[-1], Inert):
            raise ValueError("items assigned to an object that is not a mapping")

    def pop_one(self, _: object) -> None:
        # As pickle defines POP: on top of the stack a mark counts as an item.
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.pop(1)

    def load_persistent(self, _: object) -> None:
        (reference,) = self.pop(1)
        if not isinstance(reference, tuple) or len(reference) > 6:
            raise ValueError("invalid persistent id")
        kind, what, *rest = reference
        # The old format stored classes with their source code, which is not needed.
        if kind == "module":
            self.push(what)
            return
        # ("storage", class, key, device, count). A sixth entry,
        # in the format before 1.6, makes the storage a slice of another one;
        # torch writes None there today, and other files are rejected.
        key, _, count, *view = rest
        dtype = DTYPES.get(what.path.rpartition(".")[2]) if isinstance(what, Name) else None
        if kind != "storage" or dtype is None or any(view):
            raise ValueError("unknown type of tensor")
        self.push(Storage(key, dtype, count))
        self.storages.add(self.stack[-1])


def _pairs(values: list[object]) -> dict[Any, Any]:
    return _keyed(zip(values[::2], values[1::2], strict=True))


def _keyed(pairs: Iterable[tuple[object, object]]) -> dict[Any, Any]:
    """A mapping with scalar keys only: hashing nested tuples would recurse."""
    mapping = {}
    for key, value in pairs:
        if not isinstance(key, str | int | Name | None):
            raise ValueError("invalid key of a mapping")
        mapping[key] = value
    return mapping


def _first_and_rest(values: list[object]) -> tuple[object, list[object]]:
    return values[0], values[1:]


Operation = Callable[[_Machine, Any], Any]
LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT"),
    *("BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE"),
    *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
OPERATIONS: dict[str, Operation] = {
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "POP": _Machine.pop_one,
    "POP_MARK": lambda m, _: m.since_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE1": lambda m, _: m.push(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.pop(3))),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "LIST": lambda m, _: m.push(m.since_mark()),
    "EMPTY_SET": lambda m, _: m.push([]),
    "FROZENSET": lambda m, _: m.push(m.since_mark()),
    "APPEND": lambda m, _: m.extend(m.pop(1)),
    "APPENDS": lambda m, _: m.extend(m.since_mark()),
    "ADDITEMS": lambda m, _: m.extend(m.since_mark()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "DICT": lambda m, _: m.push(_pairs(m.since_mark())),
    "SETITEM": lambda m, _: m.assign(m.pop(2)),
    "SETITEMS": lambda m, _: m.assign(m.since_mark()),
    "GLOBAL": lambda m, argument: m.push(Name.of(argument)),
    "STACK_GLOBAL": _Machine.name_of_two,
    "REDUCE": lambda m, _: m.call(*m.pop(2)),
    "INST": lambda m, argument: m.call(Name.of(argument), m.since_mark()),
    "OBJ": lambda m, _: m.call(*_first_and_rest(m.since_mark())),
    "NEWOBJ": lambda m, _: m.instantiate(m.pop(2)),
    "NEWOBJ_EX": lambda m, _: m.instantiate(m.pop(3)),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.load_persistent,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, number: m.memo.__setitem__(number, m.stack[-1])),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, number: m.push(m.memo[number])),
    "MEMOIZE": lambda m, _: m.memo.__setitem__(len(m.memo), m.stack[-1]),
}


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
        machine = _Machine()
        root = machine.run(io.BytesIO(archive.read(names[0])))
        # Only what the pickle refers to is read; an archive may have further entries.
        keys = {storage.key for storage in machine.storages}
        return _complete(root, machine, {key: bytearray(archive.read(f"{folder}data/{key}")) for key in keys})


def _load_pickles(file: BinaryIO) -> Content:
    """The format before torch 1.6 (magic number, version,
    system, content, storages), or one plain pickle."""
    machine = _Machine()
    root = machine.run(file)
    if root != LEGACY_MAGIC:
        return _complete(root, machine, {})
    _, _, machine = _Machine().run(file), _Machine().run(file), _Machine()
    root, keys = machine.run(file), _Machine().run(file)
    kinds = {storage.key: storage for storage in machine.storages}
    numbers = {}
    for key in keys:
        # Each storage begins with its number of items as 8 bytes. The pickle has told how many
        # there must be, so that a damaged count cannot make this read or allocate more.
        if not isinstance(key, str) or key not in kinds or int.from_bytes(file.read(8), "little") != kinds[key].count:
            raise ValueError("data without a tensor")
        numbers[key] = bytearray(file.read(kinds[key].nbytes))
    return _complete(root, machine, numbers)


def _complete(root: object, machine: _Machine, numbers: dict[str, bytearray]) -> Content:
    if any(storage.key not in numbers or len(numbers[storage.key]) != storage.nbytes for storage in machine.storages):
        raise ValueError("tensor data truncated")
    return root, numbers
