"""Sizes and checksums of a data folder's files, in ``checksums.txt`` beside them; the fingerprint
of a dictionary.

A line ``crc32 size name`` for each file that ``fairseq-preprocess`` wrote; behind the name of
tokens, after tabs, the largest one and the fingerprint of their dictionary. fairseq ignores the
file. Commands compare sizes, the largest token and the dictionary; checksums are compared by
``fairseq-validate --check-data``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fairseq.errors import UserError
from fairseq.system.files import atomic_file
from fairseq.system.opening import decoded, read_errors, read_named

logger = logging.getLogger(__name__)

NAME = "checksums.txt"
_PIECE = 1 << 22


@dataclass(frozen=True)
class Entry:
    """What ``checksums.txt`` has of a file; of tokens, also the *largest* and the fingerprint of
    their *dictionary*."""

    size: int
    crc: int
    largest: int | None = None
    dictionary: str = ""

    def check_size(self, path: str | Path, size: int) -> None:
        """Raise UserError unless the file at *path*, of *size* bytes, has the recorded one."""
        if size != self.size:
            raise _changed(path, f"{size} bytes differs from {NAME}, {self.size} expected")


def record(written: Path, folder: Path, tokens: Mapping[str, tuple[int, str]] = {}) -> None:
    """Write ``checksums.txt`` for the files of *written*, which move to *folder*; those it has
    already are kept.

    Args:
        tokens: by name of a file with tokens, the largest one and the dictionary's fingerprint.
    """
    # A second run may add a split to a folder.
    entries = recorded(folder)
    for entry in sorted(os.scandir(written), key=lambda entry: entry.name):
        if entry.is_file():
            crc = 0
            for piece in _pieces(entry.path):
                crc = zlib.crc32(piece, crc)
            entries[entry.name] = Entry(entry.stat().st_size, crc, *tokens.get(entry.name, ()))
    with atomic_file(written / NAME) as file:
        for name, found in sorted(entries.items()):
            more = "" if found.largest is None else f"\t{found.largest}\t{found.dictionary}"
            file.write(f"{found.crc:08x} {found.size} {name}{more}\n".encode())


def recorded(folder: str | Path) -> dict[str, Entry]:
    """Return the entries of ``checksums.txt`` in *folder*, by name; none without the file.

    Raises:
        UserError: the file is cut off, or is something else.
    """
    path, advice = Path(folder) / NAME, "preprocess the text again"
    if not os.path.lexists(path):
        return {}
    content = decoded(read_named(path, advice), path, advice)
    # The file that is written last tells whether the copy of a folder is complete.
    if content and not content.endswith("\n"):
        raise UserError(f"{path}: its last line is cut off; {advice}")
    entries: dict[str, Entry] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            crc, size, names = line.split(" ", 2)
            name, *tokens = names.split("\t")
            largest, dictionary = (int(tokens[0]), tokens[1]) if tokens else (None, "")
            entries[name] = Entry(int(size), int(crc, 16), largest, dictionary)
        except (ValueError, IndexError):
            raise UserError(
                f"{path}: line {number}: expected `crc32 size name`, found {line[:80]!r}; {advice}"
            ) from None
    return entries


def entry_of(path: str | Path, entries: Mapping[str, Entry]) -> Entry | None:
    """Return the entry of *path* among those of its folder, or None.

    Where other files were listed, a warning names *path*: it was put there beside what
    ``fairseq-preprocess`` wrote, perhaps with the ids of another dictionary.
    """
    entry = entries.get(os.path.basename(path))
    if entries and entry is None:
        logger.warning("%s: not in %s, so of another preparation; preprocess all texts together", path, NAME)
    return entry


def check(path: str | Path, content: bytes | None = None) -> None:
    """Raise UserError if a file is damaged or changed, by its entry in ``checksums.txt``, if there
    is one.

    *content* is the file's where it has been read already.
    """
    if (entry := entry_of(path, recorded(os.path.dirname(path) or "."))) is None:
        return
    size = crc = 0
    for piece in _pieces(path) if content is None else [content]:
        size, crc = size + len(piece), zlib.crc32(piece, crc)
    entry.check_size(path, size)
    if crc != entry.crc:
        raise _changed(path, f"its content differs from {NAME}")


def fingerprint(symbols: Iterable[str]) -> str:
    """Return the SHA-256 of *symbols* in their order, in hexadecimal digits."""
    # A line feed behind each: no symbol holds one, so that different lists cannot be one text.
    return hashlib.sha256("".join(f"{symbol}\n" for symbol in symbols).encode()).hexdigest()


def _changed(path: str | Path, difference: str) -> UserError:
    return UserError(
        f"{path}: {difference}: damaged or changed since preprocessing; preprocess the text again, or remove {NAME} if "
        "the change is intended"
    )


def _pieces(path: str | Path) -> Iterator[bytes]:
    with read_errors(path, "make it with fairseq-preprocess"), open(path, "rb") as file:
        yield from iter(lambda: file.read(_PIECE), b"")
