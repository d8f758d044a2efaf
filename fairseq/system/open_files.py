"""Descriptors of files that are read for a long time: opened when they are needed, at most some of them at once."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from fairseq.system.opening import open_descriptor

_MOST = 4096


class Descriptor:
    """An open file; it is closed when nobody uses it any more, so that a read in another thread can finish."""

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        self.number = open_descriptor(path)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound early: modules are gone at exit
        if hasattr(self, "number"):  # not if opening failed
            close(self.number)


class OpenFiles:
    """The most recently read files, half as many as the process may open: sockets and libraries need the others."""

    def __init__(self) -> None:
        self._files: OrderedDict[Hashable, Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str, version: Hashable) -> Descriptor:
        """Return *path*, open; what has another *version*, such as a replaced file, is another file.

        Raises:
            OSError: it cannot be opened, or is not a regular file.
        """
        key = path, version
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
                return self._files[key]
        opened = Descriptor(path)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, soft // 2))
        with self._lock:
            self._files[key] = opened
            while len(self._files) > most:
                self._files.popitem(last=False)
        return opened


FILES = OpenFiles()
