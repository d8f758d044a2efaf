"""Registry of named parts: models, architectures, tasks, criterions, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from fairseq.errors import UserError, nearest

T = TypeVar("T")
P = TypeVar("P")


class Registry(Generic[T]):
    """Parts of one kind, by name.

    Args:
        kind: what a part is called in messages, e.g. ``"criterion"``.
        flag: the flag that chooses one, e.g. ``"--criterion"``.
    """

    def __init__(self, kind: str, flag: str) -> None:
        self.kind = kind
        self.flag = flag
        self._parts: dict[str, T] = {}

    def register(self, name: str, config_class: type | None = None) -> Callable[[P], P]:
        """Decorator that registers a part as *name*, with the dataclass of its settings if it has one.

        Raises:
            ValueError: another part has that name.
        """

        def keep(part: P) -> P:
            if config_class is not None:  # a plug-in's for fairseq says how it is read here
                translate = getattr(config_class, "as_config", lambda: config_class)
                part.config_class = translate()  # type: ignore[attr-defined]
            known = self._parts.get(name)
            if known is not None and not _same_source(known, part):
                raise ValueError(f"{self.kind} {name!r} is registered already, by {known!r}")
            self._parts[name] = part  # type: ignore[assignment]
            return part

        return keep

    def replace(self, name: str, part: T) -> None:
        """Let *part* be the one called *name*, whatever was."""
        self._parts[name] = part

    def __getitem__(self, name: str) -> T:
        """The part called *name*.

        Raises:
            UserError: no part has that name; the message names the nearest ones.
        """
        try:
            return self._parts[name]
        except KeyError:
            raise UserError(f"{self.flag} {name}: no such {self.kind}; {nearest(name, self._parts)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._parts))


def is_plugin(part: Any) -> bool:
    """Return whether a class was defined outside this package; if so, it gets the flat namespace, as in fairseq."""
    return str(part.__module__).partition(".")[0] != __name__.partition(".")[0]


def _same_source(known: Any, part: Any) -> bool:
    """Return whether two parts are one definition imported twice (a ``--user-dir`` that is also a package)."""
    return getattr(known, "__qualname__", None) == getattr(part, "__qualname__", object()) and getattr(
        getattr(known, "__code__", None), "co_filename", getattr(known, "__module__", None)
    ) == getattr(getattr(part, "__code__", None), "co_filename", getattr(part, "__module__", None))
