"""Bounds on the plain data of a checkpoint, so that whatever walks over it ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq.errors import UserError

DEPTH = 64
BITS = 128  # of a whole number
REPEATED = 1 << 20
"""Values that parts referred to more than once may add; a pair of numbers that 100,000 groups share adds 200,000."""


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
    open_parts = {id(state)}
    # A stack instead of recursion, which a deep state would end first.
    stack: list[tuple[str, Any, Iterator[tuple[Any, Any]]]] = [("", state, _parts(state))]
    totals, stored = [1], 1
    while stack:
        name, value, items = stack[-1]
        for key, item in items:
            stored += 1
            inner = f"{name}.{key!s:.60}".lstrip(".") if len(stack) <= 4 else name
            if isinstance(item, int) and item.bit_length() > BITS:
                raise _invalid(path, inner, f"a number of {item.bit_length():,} bits")
            if not _has_parts(item):
                totals[-1] += 1
            elif id(item) in open_parts:
                raise _invalid(path, inner, "a value that contains itself")
            elif id(item) in sizes:
                totals[-1] += sizes[id(item)]
            else:
                if len(stack) >= DEPTH:
                    raise _invalid(path, inner, f"nested deeper than {DEPTH} levels")
                open_parts.add(id(item))
                stack.append((inner, item, _parts(item)))
                totals.append(1)
                break
        else:
            stack.pop()
            open_parts.discard(id(value))
            sizes[id(value)] = totals.pop()
            if totals:
                totals[-1] += sizes[id(value)]
    if sizes[id(state)] > REPEATED + 4 * stored:
        raise UserError(
            f"{path}: not a checkpoint (its {stored:,} values repeat to more than "
            f"2^{sizes[id(state)].bit_length() - 1}); use another checkpoint"
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
