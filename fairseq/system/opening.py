"""Files opened as what they should be: regular ones to read, pipes and devices only where a command
waits for them."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fairseq.errors import UserError, read_failure

BOM = codecs.BOM_UTF8  # which editors of Windows and spreadsheets put before a text
LARGEST_TEXT = 1 << 28  # bytes of a file that is read as a whole


def open_descriptor(path: str | Path) -> int:
    """Open a regular file to read; a pipe or device,
    which may never end, is an OSError and is not waited for."""
    # Without O_NONBLOCK opening a pipe waits for a process that writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number) if stat.S_ISDIR(mode) else "not a regular file", str(path))
    return descriptor


def open_regular(path: str | Path) -> io.BufferedReader:
    """Return a regular file, open to read; see :func:`open_descriptor`."""
    return open(path, "rb", opener=lambda name, flags: open_descriptor(name))


def read_regular(path: str | Path, largest: int = LARGEST_TEXT) -> bytes:
    """Return the content of a regular file; OSError
    if it is none, or larger than *largest* bytes."""
    with open_regular(path) as file:
        # By reading and not by the size that the file system tells: the file may grow meanwhile.
        content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"larger than {largest / 2**20:,.0f} MiB", str(path))
    return content


@contextlib.contextmanager
def read_errors(name: str | Path, advice: str) -> Iterator[None]:
    """Raise UserError, which begins with *name* and ends
    in *advice*, where a file cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{name}: {read_failure(error)}; {advice}") from None


def read_named(path: str | Path, advice: str, flag: str = "", largest: int = LARGEST_TEXT) -> bytes:
    """Return the content of a regular file that a user or a folder names; see :func:`read_regular`.

    Raises:
        UserError: it cannot be read; the message names *flag* and *path*, and ends in *advice*.
    """
    with read_errors(f"{flag} {path}".removeprefix(" "), advice):
        return read_regular(path, largest)


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


def open_input(path: str | Path) -> BinaryIO:
    """Open a file that a flag names: a regular one,
    or a pipe of this process (``<(command)`` of a shell).

    Anything else is an OSError: a pipe with a name
    may never be written to, and a device never ends.
    """
    # Where `/dev/fd/N` leads, with /proc and without.
    pipes = (f"/proc/{os.getpid()}/fd/pipe:", "/dev/fd/")
    if os.path.realpath(path).startswith(pipes) and is_special(path):
        return open(path, "rb")
    return open_regular(path)


def open_special(path: str | Path) -> BinaryIO:
    """Open a device or a pipe to write; OSError where
    no process reads the pipe, which would be waited for."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no process reads it", str(path)) from None
        raise
    # Opening must not wait; writing may.
    os.set_blocking(descriptor, True)
    return open(descriptor, "wb")


def is_special(path: str | Path) -> bool:
    """Return whether *path* exists and is a device, a pipe or a socket."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
