"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write (and read back) that becomes *path* when the ``with`` block ends without an exception.

    It is written under a temporary name in the same folder, flushed to disk and renamed; after an exception it is
    removed, and what *path* held before stays as it was.
    """
    target = os.fspath(path)
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
