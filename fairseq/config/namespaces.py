"""The flat namespace of settings, which plug-ins read."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from types import FunctionType
from typing import Any


class NamespaceOfArchitecture(argparse.Namespace):
    """Settings that have the name of the architecture as ``_name``, too, unless it is set."""

    def __getattr__(self, name: str) -> Any:
        if name == "_name" and "arch" in vars(self):
            return self.arch
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def namespace_of(settings: Any) -> argparse.Namespace:
    """Return the namespace of *settings*, a ``Settings``; attributes that are set on it are in
    ``settings.flat``."""
    args = NamespaceOfArchitecture()
    args.__dict__ = settings.flat
    return args


def namespace_with_methods(cls: type, values: Mapping[str, object]) -> Any:
    """*values* as a namespace with the methods of the settings *cls*."""
    return _class_with_methods(cls)(**values)


@functools.cache
def _class_with_methods(cls: type) -> type[argparse.Namespace]:
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__[:-1]):
        methods |= {
            name: value
            for name, value in vars(base).items()
            if not name.startswith("__") and isinstance(value, FunctionType | property)
        }
    return type(cls.__name__, (argparse.Namespace,), methods)
