"""A bound on the tuples of a pickle that holds before it is read: keys of dicts are hashed as they are read."""

from __future__ import annotations

import pickletools
from typing import IO, Any

LARGEST = 1 << 20
"""Values in a tuple, nested ones included, each as often as it is repeated."""
_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_TUPLES = ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE")
# torch.Size is a tuple, too.
_COUNTED = (*_TUPLES, "REDUCE", "BUILD", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST", "FROZENSET")


class RepeatedTuple(ValueError):
    """A tuple repeats its values without bound."""


def check_tuples(pickled: IO[bytes]) -> None:
    """Read the pickle up to its end, without building anything, and count the values of its tuples.

    A pickle of a few hundred bytes can hold a tuple that contains another twice, which does, and so on. Where it is
    the key of a dict, Python hashes a million million values, within the reader: :func:`check_bounded` comes too late.

    Raises:
        RepeatedTuple: a tuple has more than :data:`LARGEST` values.
        ValueError: this is no pickle.
    """
    stack: list[int] = []  # the number of values of each, 0: a mark
    memo: dict[int, int] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            _step(opcode, argument, stack, memo)
            if stack and stack[-1] > LARGEST:
                raise RepeatedTuple(f"its values repeat to more than {LARGEST:,} in one tuple")
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
