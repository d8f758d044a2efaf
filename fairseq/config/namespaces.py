"""The flat namespace of settings, which plug-ins read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq.config.settings import Settings


class NamespaceOfArchitecture(argparse.Namespace):
    """Settings that have the name of the architecture as ``_name``, too, unless it is set."""

    def __getattr__(self, name: str) -> Any:
        if name == "_name" and "arch" in vars(self):
            return self.arch
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def namespace_of(settings: Settings) -> argparse.Namespace:
    """Return the namespace of *settings*; attributes that are set on it are in
    ``settings.flat``."""
    args = NamespaceOfArchitecture()
    args.__dict__ = settings.flat
    return args


class ReadsNamespace:
    """Base of parts that are made from the namespace: which settings they read of it cannot be
    seen."""

    @classmethod
    def settings_of(cls, settings: Settings) -> argparse.Namespace:
        return namespace_of(settings)

    @classmethod
    def unread(cls, stored: Mapping[str, object]) -> Mapping[str, object]:
        return {}


def reads_namespace(part: Any) -> bool:
    """Return whether *part*, a class or an object, is made from the namespace."""
    return getattr(part.settings_of, "__func__", None) is vars(ReadsNamespace)["settings_of"].__func__
