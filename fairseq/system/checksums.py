"""Sizes and checksums of a data folder's files, in ``checksums.txt`` beside them; the fingerprint
of a dictionary.

A line ``crc32 size name`` for each file that ``fairseq-preprocess`` wrote. fairseq ignores the
file; folders without it are read unchecked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from fairseq.errors import UserError
from fairseq.system.files import atomic_file
from fairseq.system.opening import decoded, read_errors, read_named

logger = logging.getLogger(__name__)

NAME = "checksums.txt"
INTERVAL = 10.0  # seconds between lines of progress
_PIECE = 1 << 22


def record(written: Path, folder: Path) -> None:
    """Write ``checksums.txt`` for the files of *written*, which move to *folder*; those it has
    already are kept."""
    # A second run may add a split to a folder.
    entries = _read(folder / NAME) if os.path.exists(folder / NAME) else {}
    for entry in sorted(os.scandir(written), key=lambda entry: entry.name):
        if entry.is_file():
            crc = 0
            for piece in _pieces(entry.path):
                crc = zlib.crc32(piece, crc)
            entries[entry.name] = entry.stat().st_size, crc
    with atomic_file(written / NAME) as file:
        for name, (size, crc) in sorted(entries.items()):
            file.write(f"{crc:08x} {size} {name}\n".encode())


class Verification:
    """The checks of a folder's files while they are opened: ``checksums.txt``, read once, and a log
    of the progress.

    The progress is through *files*, which will be checked; without them none is logged.
    """

    def __init__(self, folder: str | Path, files: Iterable[str] = ()) -> None:
        listed = Path(folder) / NAME
        self.folder = folder
        self._entries = _read(listed) if os.path.exists(listed) else {}
        self._done = 0
        self._all = sum(os.path.getsize(path) for path in files if os.path.exists(path))
        self._logged = time.monotonic()

    def expected(self, path: str | Path) -> tuple[int, int] | None:
        """Return size and CRC-32 of *path*, a file of the folder; None if they were not recorded.

        Where other files were listed, a warning names *path*: it was put there beside what
        ``fairseq-preprocess`` wrote, perhaps with the ids of another dictionary.
        """
        name = os.path.basename(path)
        if self._entries and name not in self._entries:
            logger.warning("%s: not in %s, so of another preparation; preprocess all texts together", path, NAME)
        return self._entries.get(name)

    def advance(self, size: int) -> None:
        """Log that *size* more bytes were checked, if the last line is some seconds old."""
        self._done += size
        if self._all and time.monotonic() - self._logged >= INTERVAL:
            self._logged = time.monotonic()
            logger.info("%s: checked %.1f of %.1f GB", self.folder, self._done / 1e9, self._all / 1e9)


def check(path: str | Path, pieces: Iterable[bytes] | None = None) -> None:
    """Raise UserError if a file is missing, damaged or changed, by its line in ``checksums.txt``,
    if there is one.

    *pieces* are its content, where it has been read already.
    """
    verification = Verification(os.path.dirname(path))
    if verification.expected(path) is None:
        return
    checksum = Checksum(path, verification)
    for piece in _pieces(path) if pieces is None else pieces:
        checksum.add(piece)
    checksum.check()


def fingerprint(symbols: Iterable[str]) -> str:
    """Return the SHA-256 of *symbols* in their order, in hexadecimal digits."""
    # A line feed behind each: no symbol holds one, so that different lists cannot be one text.
    return hashlib.sha256("".join(f"{symbol}\n" for symbol in symbols).encode()).hexdigest()


class Checksum:
    """The CRC-32 of a file, ``crc``, computed while it is read for another purpose."""

    def __init__(self, path: str | Path, verification: Verification) -> None:
        self.path = path
        self._verification = verification
        self._size = self.crc = 0

    def add(self, piece: bytes | memoryview) -> None:
        self.crc = zlib.crc32(piece, self.crc)
        self._size += len(piece)
        self._verification.advance(len(piece))

    def check(self) -> None:
        """Raise UserError if the content differs from ``checksums.txt``."""
        size, crc = self._verification.expected(self.path) or (self._size, self.crc)
        if (self._size, self.crc) == (size, crc):
            return
        difference = f"its content differs from {NAME}"
        if self._size != size:
            difference = f"{self._size} bytes differs from {NAME}, {size} expected"
        raise UserError(
            f"{self.path}: {difference}: damaged or changed since preprocessing; preprocess the text again, or remove "
            f"{NAME} if the change is intended"
        )


def _read(path: Path) -> dict[str, tuple[int, int]]:
    """(size, CRC-32) of each file that ``checksums.txt`` lists."""
    advice = "preprocess the text again"
    content = decoded(read_named(path, advice), path, advice)
    # The file that is written last tells whether the copy of a folder is complete.
    if content and not content.endswith("\n"):
        raise UserError(f"{path}: its last line is cut off; preprocess the text again")
    entries: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(content.splitlines(), 1):
        crc, size, name = (line.split(" ", 2) + ["", ""])[:3]
        try:
            entries[name] = int(size), int(crc, 16)
        except ValueError:
            raise UserError(
                f"{path}: line {number}: expected `crc32 size name`, found {line[:80]!r}; preprocess the text again"
            ) from None
    return entries


def _pieces(path: str | Path) -> Iterator[bytes]:
    with read_errors(path, "make it with fairseq-preprocess"), open(path, "rb") as file:
        yield from iter(lambda: file.read(_PIECE), b"")
