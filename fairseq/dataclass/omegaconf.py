"""The names of omegaconf that settings of fairseq's plug-ins are written with, for where it is not
installed."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

MISSING = "???"


def stand_in() -> None:
    """Let plug-ins import this module as ``omegaconf`` where that package is not installed."""
    if "omegaconf" not in sys.modules and importlib.util.find_spec("omegaconf") is None:
        sys.modules["omegaconf"] = sys.modules[__name__]


class DictConfig(argparse.Namespace):
    """Settings by name, as attributes and as items."""

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self, name, value)

    def get(self, name: str, default: object = None) -> Any:
        return vars(self).get(name, default)


class ListConfig(list):
    """A list among settings; plug-ins mention it in annotations."""


class OmegaConf:
    """The operations on settings that make sense for plain values."""

    @staticmethod
    def create(value: object = None) -> Any:
        """Nested dicts as settings; other values unchanged."""
        if isinstance(value, dict):
            return DictConfig(**{name: OmegaConf.create(each) for name, each in value.items()})
        return DictConfig() if value is None else value

    @staticmethod
    def is_config(value: object) -> bool:
        """Return False: settings are plain values here."""
        return isinstance(value, DictConfig | ListConfig)

    @staticmethod
    def to_container(value: object, **options: object) -> Any:
        """Return *value*, which is a plain one already."""
        return value

    @staticmethod
    def set_struct(value: object, flag: bool) -> None:
        """Do nothing: settings may always be added to."""


def II(path: str) -> str:
    """A reference to the setting at *path*, such as ``optimization.lr``, as a default."""
    return f"${{{path}}}"


@contextlib.contextmanager
def open_dict(value: object) -> Iterator[object]:
    """*value*, which may always be added to."""
    yield value
