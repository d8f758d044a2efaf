"""The flat namespace of settings, which plug-ins read."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq.config.settings import Settings


def namespace_of(settings: Settings) -> argparse.Namespace:
    """Return the namespace of *settings*; attributes that are set on it are in
    ``settings.flat``."""
    args = argparse.Namespace()
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
