"""Settings that are given as text, such as ``(0.9, 0.98)``."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from fairseq.errors import UserError


def eval_str_dict(x: object, type: Callable[[Any], object] = dict) -> Any:
    """The value, such as a dict, that a text names; what is no text is a value already.

    Raises:
        UserError: the text is no literal; it is read, not run.
    """
    if not isinstance(x, str):
        return x
    try:
        return ast.literal_eval(x)
    # `literal_eval` of hostile text ends in any of these; deep nesting in the last two.
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise UserError(f"{x!r}: expected a Python literal such as (0.9, 0.98)") from None


def eval_str_list(
    x: object, type: Callable[[Any], object] = float, x_type: Callable[[Any], object] | None = None
) -> Any:
    """The list that a text such as ``[0.9, 0.98]`` names, its items as *type*; of a single value a
    list of one."""
    value = eval_str_dict(x)
    if value is None:
        return None
    return list(map(x_type or type, value if isinstance(value, list | tuple) else [value]))


def eval_bool(x: object, default: bool = False) -> bool:
    """The truth value that a text such as ``True`` names."""
    return default if x is None else bool(eval_str_dict(x))


def csv_str_list(x: str) -> list[str]:
    return x.split(",")
