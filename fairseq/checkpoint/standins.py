"""Replacements, holding data only, for the classes named in pickles of foreign checkpoints.

The unpickler resolves names in :data:`SAFE_GLOBALS` only and never imports anything: a numpy scalar
becomes a Python number, a meter of fairseq 0.8 an object with its attributes, a namespace a dict.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

import numpy as np

_NUMBER = re.compile(r"[<>|=]?[biuf]\d{1,2}")


class DType:
    """Replacement of ``numpy.dtype`` for a number: type code and byte order."""

    # Whether to align and to copy does not matter here.
    def __init__(self, code: str, *_: object) -> None:
        self.code = code
        self.order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # State of numpy's dtypes: version, byte order, and fields that numbers do not have.
        self.order = state[1]

    def numpy(self) -> np.dtype[Any]:
        """Return the numpy dtype; raise ValueError if it is not
        a boolean, an integer or a floating-point number."""
        if not _NUMBER.fullmatch(str(self.code)):
            raise ValueError(f"numpy dtype {self.code!r} is not a number type")
        return np.dtype(self.code).newbyteorder("<" if self.order == "<" else ">" if self.order == ">" else "=")


def scalar(dtype: DType, data: bytes | str) -> bool | int | float:
    """Return the number in *data* as a Python number; replaces ``numpy.core.multiarray.scalar``."""
    raw = data.encode("latin-1") if isinstance(data, str) else data
    return np.frombuffer(raw, dtype=dtype.numpy())[0].item()


class Attributes(dict[str, Any]):
    """The attributes of an object, as a dict:
    replaces a namespace, the settings of fairseq before 0.11."""

    def __setstate__(self, state: dict[str, object]) -> None:
        self.update(state)

    def __reduce__(self) -> Any:
        # Written again as what it was: fairseq reads averages of its checkpoints.
        return argparse.Namespace, (), dict(self)


class Meter:
    """A meter of fairseq 0.8, which pickled the object: attributes only."""


def _known_as(path: str, part: Callable[..., object]) -> Callable[..., object]:
    """A copy of *part* under the name *path*, for the allow-list of PyTorch's unpickler."""
    # A copy, so that the part itself keeps its name; the unpickler compares names.
    module, name = path.rsplit(".", 1)
    if isinstance(part, type):
        return type(name, (part,), {"__module__": module})

    def copy(*args: object) -> Any:
        return part(*args)

    copy.__module__, copy.__name__, copy.__qualname__ = module, name, name
    return copy


SAFE_GLOBALS: list[Callable[..., object]] = [
    _known_as("argparse.Namespace", Attributes),
    _known_as("numpy.dtype", DType),
    _known_as("numpy.core.multiarray.scalar", scalar),
    _known_as("numpy._core.multiarray.scalar", scalar),
    _known_as("fairseq.meters.AverageMeter", Meter),
    _known_as("fairseq.meters.TimeMeter", Meter),
    _known_as("fairseq.meters.StopwatchMeter", Meter),
]
