"""JSON files; they are read within bounds: UTF-8,
not too large or deep, finite numbers, no lone surrogates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from fairseq.errors import UserError
from fairseq.system.files import atomic_file
from fairseq.system.opening import read_named

DEPTH = 64
# Python converts long numbers in quadratic time.
DIGITS = 40  # of a whole number


def read_json(path: str | Path, advice: str) -> Any:
    """Return the value in a JSON file of at most *largest* bytes; a vocabulary of a million words
    takes some 50 MB.

    Raises:
        UserError: it cannot be read, is no regular file, is too large, or is not JSON as
            :func:`parse_json` reads it. The message ends in *advice*.
    """
    content = read_named(path, advice)
    try:
        return parse_json(content)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {advice}") from None


def write_json(path: str | Path, value: object, flag: str = "`results_path`") -> None:
    """Write a report to *path* atomically; NaN and infinities become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_file(path, flag) as file:
        # File names that are not UTF-8 have lone surrogates, which UTF-8 cannot represent.
        file.write(text.encode("utf-8", "backslashreplace"))


def parse_json(content: bytes | str, any_text: bool = False) -> Any:
    """Return the value of JSON in UTF-8, without a byte order mark.

    Raises:
        ValueError: it is not JSON, is nested deeper than :data:`DEPTH`, or has NaN, Infinity, a
            number beyond float64 or of more than :data:`DIGITS` digits, or, without *any_text*,
            halves of surrogate pairs, which UTF-8 lacks.
    """
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        value = json.loads(text, parse_constant=_reject, parse_float=_finite, parse_int=_integer)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte offset {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_deep(value):
        raise ValueError(f"nested deeper than {DEPTH} levels")
    # Only escapes can hold half of a pair: text decoded from UTF-8 has none. The costly check runs
    # for these alone.
    if not any_text and ("\\ud" in text or "\\uD" in text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair") from None
    return value


def finite(value: object) -> Any:
    """Return *value*, its dicts and lists, with None
    in place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_deep(value: object) -> bool:
    """Return whether lists and objects of *value* are nested deeper than :data:`DEPTH` levels."""
    # Level by level: recursion would end at the interpreter's limit.
    level = [value]
    for _ in range(DEPTH + 1):
        parts = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _reject(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    # Python reads 1e999 as infinity.
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is beyond float64")
    return value


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
