"""Text from corpora, checkpoints and users without
the control characters that a terminal would obey."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from fairseq.errors import with_flags

# C0 but for tab and line feed, DEL, C1, and the marks that reorder a line.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

LOG_FORMAT, LOG_DATES = "%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d %H:%M:%S"
WIDTH = 80  # columns of a terminal


def duration(seconds: float) -> str:
    """*seconds* as tqdm shows them: ``02:31``, and from an hour on ``1:02:31``."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def printable(text: str) -> str:
    """Return *text* with control characters as escapes such as ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@contextlib.contextmanager
def byte_bar(total: int, what: str = "") -> Iterator[Callable[[int], object]]:
    """Give a function to call with the bytes read since its last call, of *total*, which moves a
    bar on a terminal; *what* stands before the progress."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    # Imported here: that takes longer than tokenising a short text.
    from tqdm import tqdm

    with tqdm(total=total, desc=printable(what), unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update


class FileFormatter(logging.Formatter):
    """Lines of a log of a command: names of settings in backticks are shown as flags."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT, LOG_DATES)

    def format(self, record: logging.LogRecord) -> str:
        return with_flags(super().format(record))


class Formatter(FileFormatter):
    """Lines of a log on stderr, without control characters;
    on a terminal also without time and ``INFO``."""

    def format(self, record: logging.LogRecord) -> str:
        if sys.stderr.isatty() and record.levelno <= logging.INFO and not record.exc_info:
            return printable(with_flags(record.getMessage()))
        return printable(super().format(record))


_BARS = threading.RLock()
"""The lock of progress bars: tqdm's own is also a semaphore, which a process that fails would leave
behind."""


class MessageHandler(logging.StreamHandler[TextIO]):
    """Writes messages above a progress bar, if there is one, instead of into its line."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)  # not imported: there is no bar
        if bars is not None:
            bars.set_lock(_BARS)
        with bars.external_write_mode(self.stream) if bars is not None else contextlib.nullcontext():
            super().emit(record)


def write_line_by_line() -> None:
    """Let stdout and stderr write every line at once, also into a pipe such as ``| tee``.

    Characters that their encoding cannot represent are escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Drop what this process writes to descriptor 2 inside
    a ``with`` statement, libraries of other languages too."""
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Log to stderr from *level* on, unless logging is set up already."""
    write_line_by_line()
    handler = MessageHandler(sys.stderr)
    handler.setFormatter(Formatter())
    handler.addFilter(lambda record: not getattr(record, "only_in_files", False))
    logging.basicConfig(level=level, handlers=[handler])
