"""Files that a user or a folder names, read as a whole: what cannot be read is one line."""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Iterator
from pathlib import Path

from fairseq.errors import UserError, read_failure

BOM = codecs.BOM_UTF8  # which editors of Windows and spreadsheets put before a text


@contextlib.contextmanager
def read_errors(name: str | Path, advice: str) -> Iterator[None]:
    """Raise UserError, which begins with *name* and ends
    in *advice*, where a file cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}: {read_failure(error)}; {advice}") from None


def read_named(path: str | Path, advice: str, flag: str = "") -> bytes:
    """Return the content of a file that a user or a folder names.

    Raises:
        UserError: it cannot be read; the message names *flag* and *path*, and ends in *advice*.
    """
    with read_errors(f"{flag} {path}".removeprefix(" "), advice):
        return Path(path).read_bytes()


def read_text(path: str | Path, advice: str, flag: str = "") -> bytes:
    """Return the content of a text without a byte-order mark; see :func:`read_named`."""
    return read_named(path, advice, flag).removeprefix(BOM)


def decoded(content: bytes, where: str | Path, advice: str) -> str:
    """Return UTF-8 as text, without a byte-order mark.

    Raises:
        UserError: *content* is not UTF-8; the message begins with *where* and ends in *advice*.
    """
    try:
        # Python's "utf-8-sig" would count the bytes of an error without the mark.
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{where}: line {line}, byte offset {error.start}: not UTF-8; {advice}") from None
