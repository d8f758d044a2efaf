"""Imports at first use: names of packages, built-in parts, and what adapts plug-ins.

The last two are in layers above their callers. ``fairseq/__init__.py`` connects them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Plugins(Protocol):
    """Adapts parts from outside this package; implemented
    for plug-ins of fairseq in :mod:`fairseq.interop`."""

    def before_import(self) -> None:
        """Prepare for the import of a plug-in."""

    def add_flags(self, choice: str, parser: object) -> None:
        """Add to *parser* the flags that a plug-in's part,
        which *choice* chooses, leaves to fairseq."""

    def complete(self, args: object) -> None:
        """Set on *args*, the settings that a plug-in's script parsed, those that it may read."""

    def set_up(self, task: object, settings: object, dictionary: object) -> Any:
        """Return the task of the class *task* for *settings* that choose a plug-in's part, and
        *dictionary* if there are no data."""

    def build_generator(self, task: object, *args: object) -> Any:
        """Return the generator that fairseq's ``build_generator`` of *task* returns."""

    def call_main(self, cfg: object, main: object, **options: object) -> None:
        """Call *main* with the settings *cfg* of a script."""

    def from_pretrained(self, model: type, *args: object, **options: object) -> Any:
        """Return what fairseq's ``from_pretrained`` of the class *model* returns."""


@dataclass(frozen=True)
class _Connected:
    declare_parts: Callable[[], object]
    plugins: Plugins


_connected: list[_Connected] = []


def connect(declare_parts: Callable[[], object], plugins: Plugins) -> None:
    """Set what declares the built-in parts and what adapts plug-ins."""
    _connected[:] = [_Connected(declare_parts, plugins)]


def declare_parts() -> None:
    """Declare the built-in parts; repeated calls have no effect."""
    _connected[0].declare_parts()


def plugins() -> Plugins:
    """Return what adapts plug-ins."""
    return _connected[0].plugins


def names_of(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """``__getattr__`` and ``__all__`` of *package*, whose public *names* are in these modules,
    separated by spaces; ``NAME=OTHER`` is called *OTHER* there.

    They are imported when they are first used: settings can be imported without torch.
    """
    homes = {
        name.partition("=")[0]: (module, name.rpartition("=")[2])
        for module, listed in names.items()
        for name in listed.split()
    }

    def find(name: str) -> Any:
        if name not in homes:
            return submodule(package, name)
        module, original = homes[name]
        return getattr(importlib.import_module(module), original)

    return find, list(homes)


def submodule(package: str, name: str) -> Any:
    """The module *name* of *package*, which need not be imported before: packages of fairseq import
    all of theirs; AttributeError if there is none."""
    path = vars(sys.modules[package]).get("__path__")
    if path is None or name.startswith("_") or importlib.util.find_spec(f"{package}.{name}") is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return importlib.import_module(f"{package}.{name}")
