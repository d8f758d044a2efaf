"""JSON files: configurations that are read, reports that are written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.errors import UserError
from fairseq.system.files import atomic_file
from fairseq.system.opening import read_named


def read_json(path: str | Path, advice: str) -> Any:
    """Return the value in a JSON file; UserError, which ends in *advice*, if it cannot be read or
    is not JSON."""
    content = read_named(path, advice)
    try:
        return json.loads(content)
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {advice}") from None


def write_json(path: str | Path, value: object, flag: str = "`results_path`") -> None:
    """Write a report to *path* atomically; NaN and infinities become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_file(path, flag) as file:
        # File names that are not UTF-8 have lone surrogates, which UTF-8 cannot represent.
        file.write(text.encode("utf-8", "backslashreplace"))


def finite(value: object) -> Any:
    """Return *value*, its dicts and lists, with None
    in place of numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
