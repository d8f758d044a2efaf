"""``fairseq.file_io`` and ``fairseq.file_chunker_utils``: files of this machine, and pieces of
texts."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO


def cached_path(path: object, *unused: object) -> str:
    """*path*: nothing is downloaded."""
    return str(path)


class PathManager:
    """Files of this machine, under the names of iopath's functions."""

    open, copy, rm = staticmethod(open), staticmethod(shutil.copyfile), staticmethod(os.remove)
    exists, isfile, isdir = staticmethod(os.path.exists), staticmethod(os.path.isfile), staticmethod(os.path.isdir)
    ls, get_local_path = staticmethod(os.listdir), staticmethod(cached_path)
    mkdirs = staticmethod(functools.partial(os.makedirs, exist_ok=True))
    rename = staticmethod(os.replace)
    opena = staticmethod(open)  # what is written is written when it returns

    @staticmethod
    def async_close() -> bool:
        """Return that nothing is left to be written."""
        return True

    @staticmethod
    def supports_rename(path: object) -> bool:
        """Return that *path* can be renamed."""
        return True


def find_offsets(filename: str | os.PathLike[str], num_chunks: int) -> list[int]:
    """Offsets in bytes of *num_chunks* pieces of a file, and its size; each piece begins with a
    line."""
    with open(filename, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        offsets = [0]
        for chunk in range(1, num_chunks):
            file.seek(size * chunk // num_chunks)
            file.readline()
            offsets.append(file.tell())
    return [*offsets, size]


class Chunker:
    """In a ``with`` statement, the lines of a file that begin from *start_offset* on and before
    *end_offset*.

    An *end_offset* below one is the end of the file.
    """

    def __init__(self, path: str | os.PathLike[str], start_offset: int, end_offset: int) -> None:
        self.path, self.start_offset, self.end_offset = path, start_offset, end_offset
        self.file: BinaryIO | None = None

    def __enter__(self) -> Iterator[str]:
        self.file = open(self.path, "rb")
        return self._lines(self.file)

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        file.seek(self.start_offset)
        while (self.end_offset < 1 or file.tell() < self.end_offset) and (line := file.readline()):
            yield line.decode("utf-8")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.close()
