"""Pieces of texts that begin with a line, for several processes of a script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO


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
