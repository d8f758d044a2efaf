"""Data that this process has opened and checked, for later epochs and stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class Files(Protocol):
    """Data in files."""

    def is_unchanged(self) -> bool:
        """Return whether the files are still those that were opened."""
        ...


T = TypeVar("T", bound=Files)


class Checked(Generic[T]):
    """A cache of data that were checked when they were opened: they are opened again only if their files change."""

    def __init__(self) -> None:
        self._data: dict[Hashable, T] = {}

    def get(self, key: Hashable, open_data: Callable[[], T]) -> T:
        """Return the data of *key*, opened by *open_data* unless they are here and their files are unchanged."""
        data = self._data.get(key)
        if data is None or not data.is_unchanged():
            data = self._data[key] = open_data()
        return data
