"""Bounds on the plain data of a checkpoint, so that whatever walks over it ends, and on the tuples in its pickles.

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
"""Values that parts referred to more than once may add; a pair of numbers that 100,000 groups share adds 200,000."""
LARGEST_TUPLE = 1 << 20
"""Values in a tuple, nested ones included, each as often as it is repeated."""
_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_TUPLES = ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE")
# torch.Size is a tuple, too.
_COUNTED = (*_TUPLES, "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "FROZENSET")


def check_bounded(state: Any, path: str | Path) -> None:
    """Check that *state*, a tree of dicts, lists and objects, is one: with an end, not too deep, and not exponential.

    A pickle of a few hundred bytes can hold a list that contains itself, or one that contains another twice, which
    does, and so on: 40 levels are a million million values to whoever copies, prints or saves them. Here each part is
    visited once, and its size as a tree is computed from the sizes of its own parts.

    Raises:
        UserError: a part contains itself, is nested deeper than :data:`DEPTH`, or is a whole number of more than
            :data:`BITS` bits; the message names its path. Or parts repeat more than :data:`REPEATED` allows.
    """
    sizes: dict[int, int] = {}  # of the parts that are finished, as trees
    open_parts: list[int] = []  # the part that is visited, after those that contain it
    stored = 0

    def size(name: str, value: Any) -> int:
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


def _has_parts(value: Any) -> bool:
    if isinstance(value, Tensor):
        return False
    return isinstance(value, Mapping | list | tuple | set | frozenset) or bool(getattr(value, "__dict__", None))


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values, of an object its attributes; a key that has parts is a part, too."""
    if isinstance(value, Mapping):
        yield from value.items()
        yield from (("a key", key) for key in value if isinstance(key, tuple | frozenset))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    yield from getattr(value, "__dict__", {}).items()


def _invalid(path: str | Path, name: str, kind: str) -> UserError:
    return UserError(f"{path}: not a checkpoint ('{name}' is {kind}); use another checkpoint")


class RepeatedTuple(ValueError):
    """A tuple repeats its values without bound."""


def check_tuples(pickled: IO[bytes]) -> None:
    """Read the pickle up to its end, without building anything, and count the values of its tuples.

    A pickle of a few hundred bytes can hold a tuple that contains another twice, which does, and so on. Where it is
    the key of a dict, Python hashes a million million values, within the reader: :func:`check_bounded` comes too late.

    Raises:
        RepeatedTuple: a tuple has more than :data:`LARGEST_TUPLE` values.
        ValueError: this is no pickle.
    """
    stack: list[int] = []  # the number of values of each, 0: a mark
    memo: dict[int, int] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            _step(opcode, argument, stack, memo)
            if stack and stack[-1] > LARGEST_TUPLE:
                raise RepeatedTuple(f"its values repeat to more than {LARGEST_TUPLE:,} in one tuple")
    except (IndexError, KeyError, TypeError, UnicodeError) as error:
        raise ValueError(f"no pickle: {error}") from None


def _step(opcode: pickletools.OpcodeInfo, argument: Any, stack: list[int], memo: dict[int, int]) -> None:
    name = opcode.name
    if name == "MARK":
        stack.append(0)
    elif name in _GETS:
        stack.append(memo[int(argument)])
    elif name in _PUTS or name == "MEMOIZE":
        memo[len(memo) if name == "MEMOIZE" else int(argument)] = stack[-1]
    elif name == "DUP":
        stack.append(stack[-1])
    else:
        # pickletools knows what every opcode takes from the stack and puts there.
        before, values = list(opcode.stack_before), []
        if pickletools.markobject in before:
            values = _to_mark(stack)
            before = before[: before.index(pickletools.markobject)]
        values = [*values, *(stack.pop() for _ in before)]
        count = 1 + sum(values) if name in _COUNTED else 1
        stack += [count] * len(opcode.stack_after)


def _to_mark(stack: list[int]) -> list[int]:
    """Take what lies above the last mark off the *stack*, and the mark."""
    mark = len(stack) - 1 - stack[::-1].index(0)
    values = stack[mark + 1 :]
    del stack[mark:]
    return values
