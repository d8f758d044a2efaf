"""One example of fuzzing: what a reader may do with a damaged input, within bounds of time and
memory."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq.errors import UserError
from fuzz.readers import READERS, Reader, prepare

MEMORY = 1 << 30  # bytes more than at the start of an example
SECONDS = 60  # only to end an example that hangs, however slow the machine is


class Found(AssertionError):
    """A reader did what it may not."""


@contextlib.contextmanager
def bounded(memory: int = MEMORY, seconds: int = SECONDS) -> Iterator[None]:
    """Limit the memory and time of this process."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    def stop(number: int, frame: Any) -> None:
        raise Found(f"takes more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def expected(reader: Reader, seed: Path) -> Any:
    """What *reader* makes of a seed."""
    return reader.read(seed)


def check(name: str, number: int, work: Path) -> str:
    """Read damaged input *number* of reader *name*; return the error of a rejected one, "" of an
    accepted one.

    Raises:
        Found: the reader fails otherwise than by a UserError of one line, hangs, uses memory
            without bound, or accepts what it must not.
    """
    reader = READERS[name]
    target, seed = prepare(reader, random.Random(f"{name} {number}"), work)
    place = f"{name} {number} ({target})"
    wanted = expected(reader, seed) if reader.exact else None
    try:
        with bounded():
            value = reader.read(target)
    except UserError as error:
        if len(str(error)) > 2000:
            raise Found(f"{place}: an error of {len(str(error))} characters") from error
        return str(error)
    except Found as error:
        raise Found(f"{place}: {error}") from error
    except Exception as error:
        raise Found(f"{place}: {type(error).__name__}: {str(error)[:300]}") from error
    if reader.exact and value != wanted:
        raise Found(f"{place}: accepted, with another result than {seed}")
    return ""
