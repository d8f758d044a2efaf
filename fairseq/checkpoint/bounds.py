"""Bounds on the plain data of a checkpoint, so that whatever walks over it ends, and on the tuples
in its pickles.

Those must hold before a pickle is read: keys of dicts are hashed as they are read.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from fairseq.errors import UserError

DEPTH = 64
BITS = 128  # of a whole number
REPEATED = 1 << 20
"""Values that parts referred to more than once may add; a pair of numbers that 100,000 groups share
adds 200,000."""
LARGEST_TUPLE = 1 << 20
"""Values in a tuple, nested ones included, each as often as it is repeated."""
MARKS = 1000
"""Marks, each of a value that has begun, on the stack at once; values are nested :data:`DEPTH`
levels at most."""
STEPS = 4_000_000
"""Opcodes of a pickle, of which a checkpoint has some thousands; reading a million takes up to two
seconds."""
_REFERENCE = 6  # values of the tuple that refers to a storage
_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_TUPLES = ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE")
# torch.Size is a tuple, too.
_COUNTED = (*_TUPLES, "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "FROZENSET")
# pickletools knows what every opcode takes from the stack and puts there.
_TO_MARK = {code.name for code in pickletools.opcodes if pickletools.markobject in code.stack_before}


def _below_mark(code: pickletools.OpcodeInfo) -> int:
    before = list(code.stack_before)
    return before.index(pickletools.markobject) if code.name in _TO_MARK else len(before)


_EFFECTS = {code.name: (_below_mark(code), len(code.stack_after)) for code in pickletools.opcodes}
_VALUES = {name for name, effect in _EFFECTS.items() if effect == (0, 1)} - {*_TO_MARK, *_TUPLES, *_GETS, "MARK"}


def check_bounded(state: object, path: str | Path) -> None:
    """Check that *state*, a tree of dicts, lists and objects, is one: with an end, not too deep,
    and not exponential.

    A pickle of a few hundred bytes can hold a list that contains itself, or one that contains
    another twice, which does, and so on: 40 levels are a million million values to whoever copies,
    prints or saves them. Here each part is visited once, and its size as a tree is computed from
    the sizes of its own parts.

    Raises:
        UserError: a part contains itself, is nested deeper than :data:`DEPTH`,
            or is a whole number of more than :data:`BITS` bits; the message names its path.
            Or parts repeat more than :data:`REPEATED` allows.
    """
    sizes: dict[int, int] = {}  # of the parts that are finished, as trees
    open_parts: list[int] = []  # the part that is visited, after those that contain it
    stored = 0

    def size(name: str, value: object) -> int:
        """The number of values in *value*, called *name*, as a tree."""
        nonlocal stored
        stored += 1
        if isinstance(value, int) and value.bit_length() > BITS:
            raise _invalid(path, name, f"a number of {value.bit_length():,} bits")
        if not _has_parts(value):
            return 1
        if id(value) in open_parts:
            raise _invalid(path, name, "a value that contains itself")
        if id(value) not in sizes:
            # Which also ends the recursion before Python's limit.
            if len(open_parts) >= DEPTH:
                raise _invalid(path, name, f"nested deeper than {DEPTH} levels")
            open_parts.append(id(value))
            total = 1
            for key, item in _parts(value):
                inner = f"{name}.{key!s:.60}".lstrip(".") if len(open_parts) <= 4 else name
                total += size(inner, item)
            open_parts.pop()
            sizes[id(value)] = total
        return sizes[id(value)]

    total = size("", state)
    if total > REPEATED + 4 * stored:
        raise UserError(
            f"{path}: not a checkpoint (its {stored:,} values repeat to more than "
            f"2^{total.bit_length() - 1}); use another checkpoint"
        )


def _has_parts(value: object) -> bool:
    if isinstance(value, Tensor):
        return False
    return isinstance(value, Mapping | list | tuple | set | frozenset) or bool(getattr(value, "__dict__", None))


def _parts(value: object) -> Iterator[tuple[Any, Any]]:
    """Keys and values, of an object its attributes; a key that has parts is a part, too."""
    if isinstance(value, Mapping):
        yield from value.items()
        yield from (("a key", key) for key in value if isinstance(key, tuple | frozenset))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    yield from getattr(value, "__dict__", {}).items()


def _invalid(path: str | Path, name: str, kind: str) -> UserError:
    return UserError(f"{path}: not a checkpoint ('{name}' is {kind}); use another checkpoint")


class UnboundedPickle(ValueError):
    """A pickle whose values repeat, or are nested, without bound."""


Item = tuple[int, Any]
"""On the stack: the number of values in it, 0 for a mark; a literal, or the literals at the
beginning of a tuple."""
_MARK: Item = 0, None


def check_tuples(pickled: IO[bytes]) -> int:
    """Read the pickle up to its end, without building anything, and count the values of its tuples.

    A pickle of a few hundred bytes can hold a tuple that contains another twice, which does, and so
    on. Where it is the key of a dict, Python hashes a million million values, within the reader:
    :func:`check_bounded` comes too late.

    Returns:
        The elements of all storages that the pickle refers to, for which the older format's reader
        makes room unread.

    Raises:
        UnboundedPickle: a tuple has more than :data:`LARGEST_TUPLE` values, more than :data:`MARKS`
            are unfinished, or there are more than :data:`STEPS` opcodes.
        ValueError: this is no pickle.
    """
    stack: list[Item] = []
    memo: dict[int, Item] = {}
    storages: dict[str, int] = {}
    marks = 0
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
            name = opcode.name
            if count >= STEPS:
                raise UnboundedPickle(f"it takes more than {STEPS:,} steps")
            if name in _VALUES:  # most are
                stack.append((1, argument))
            elif name == "MARK":
                marks += 1
                if marks > MARKS:
                    raise UnboundedPickle(f"more than {MARKS:,} of its values are nested")
                stack.append(_MARK)
            elif name in _PUTS:
                memo[int(argument) if isinstance(argument, str | int) else len(memo)] = stack[-1]
            elif name in _GETS:
                stack.append(memo[int(str(argument))])
            elif name == "DUP":
                stack.append(stack[-1])
            else:
                marks -= name in _TO_MARK
                _step(opcode, argument, stack, storages)
            if stack and stack[-1][0] > LARGEST_TUPLE:
                raise UnboundedPickle(f"its values repeat to more than {LARGEST_TUPLE:,} in one tuple")
    except (IndexError, KeyError, TypeError, UnicodeError) as error:
        raise ValueError(f"no pickle: {error}") from None
    return sum(storages.values())


def _step(opcode: pickletools.OpcodeInfo, argument: object, stack: list[Item], storages: dict[str, int]) -> None:
    name = opcode.name
    pops, pushes = _EFFECTS[name]
    values = _to_mark(stack) if name in _TO_MARK else []
    values = [*values, *(stack.pop() for _ in range(pops))]
    if name == "BINPERSID":
        _count_storage(values[0][1], storages)
    if not pushes:
        return
    content = argument
    if name in _TUPLES:
        ordered = values if name in _TO_MARK else values[::-1]
        content = [literal if isinstance(literal, str | int) else None for _, literal in ordered[:_REFERENCE]]
    count = 1 + sum(size for size, _ in values) if name in _COUNTED else 1
    stack += [(count, content)] * pushes


def _count_storage(reference: Any, storages: dict[str, int]) -> None:
    """Add to *storages*, elements by key, the one that *reference* names:
    ``("storage", type, key, device, elements)``.

    Any other reference, which no checkpoint has, counts as larger than every file.
    """
    is_known = isinstance(reference, list) and len(reference) >= 5 and isinstance(reference[4], int)
    key, elements = (reference[2], abs(reference[4])) if is_known else (None, 1 << 63)
    storages[repr(key)] = max(elements, storages.get(repr(key), 0))


def _to_mark(stack: list[Item]) -> list[Item]:
    """Take what lies above the last mark off the *stack*, and the mark."""
    mark = len(stack) - 1
    while stack[mark][0]:
        mark -= 1
        if mark < 0:
            raise IndexError("no mark")
    values = stack[mark + 1 :]
    del stack[mark:]
    return values
