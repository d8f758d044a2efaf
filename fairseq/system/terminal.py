"""Text from corpora, checkpoints and users without
the control characters that a terminal would obey."""

from __future__ import annotations

import contextlib
import html
import io
import logging
import os
import re
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NoReturn, TextIO

from fairseq.errors import with_flags

# C0 but for tab and line feed, DEL, C1, and the marks that reorder a line.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

LOG_FORMAT, LOG_DATES = "%(asctime)s | %(levelname)s | %(message)s", "%Y-%m-%d %H:%M:%S"
WIDTH = 80  # columns of a terminal
LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal


def duration(seconds: float) -> str:
    """*seconds* as tqdm shows them: ``02:31``, and from an hour on ``1:02:31``."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def printable(text: str) -> str:
    """Return *text* with control characters as escapes such as ``\\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class PrintableOutput(io.RawIOBase):
    """Symbols in UTF-8 for a terminal: written to *file*
    as *readable* makes them, without control characters.

    A write ends with a symbol.
    """

    def __init__(self, file: BinaryIO, readable: Callable[[str], str]) -> None:
        self._file = file
        self._readable = readable

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = re.sub(r"[^ \n]+", lambda match: self._readable(match[0]), bytes(data).decode())
        self._file.write(printable(text).encode())
        return len(data)


def page_text(text: str) -> str:
    """Return *text* for an HTML page: printable, with ``<``, ``&`` and quotes escaped."""
    return html.escape(printable(text))


@contextlib.contextmanager
def byte_bar(total: int, what: str = "") -> Iterator[Callable[[int], object]]:
    """Give a function to call with the bytes read since its last call, of *total*; *what* stands
    before the progress.

    On a terminal it moves a bar; elsewhere it writes a line to stderr every :data:`LINE_SECONDS`.
    """
    if not sys.stderr.isatty():
        yield ByteLines(total, what, sys.stderr).update
        return
    # Imported here: that takes longer than tokenising a short text.
    from tqdm import tqdm

    with tqdm(total=total, desc=printable(what), unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update


class ByteLines:
    """Progress in *total* bytes as lines on *stream*,
    with the remaining time; *what* stands before the numbers."""

    def __init__(self, total: int, what: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.what = what
        self.stream = stream
        self.clock = clock
        self.done = 0
        self.started = self.shown = clock()

    def update(self, count: int) -> None:
        self.done += count
        now = self.clock()
        if now - self.shown < LINE_SECONDS or not 0 < self.done <= self.total:
            return
        self.shown = now
        remaining = duration((now - self.started) * (self.total / self.done - 1))
        print(f"{printable(self.what)}: {self.done / self.total:.0%}, eta {remaining}", file=self.stream, flush=True)


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


def open_standard_streams() -> None:
    """Open stdin, stdout and stderr on the null device where the process was started without them,
    as by ``>&-``.

    Python has None for a closed one, and the next file to be opened would get its descriptor.
    Characters that the encoding of stdout cannot represent are escaped.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            # Never closed: another file would get its descriptor.
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


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
    open_standard_streams()
    handler = MessageHandler(sys.stderr)
    handler.setFormatter(Formatter())
    handler.addFilter(lambda record: not getattr(record, "only_in_files", False))
    logging.basicConfig(level=level, handlers=[handler])


class PrintableStream:
    """A text stream to a terminal that shows control characters
    as escapes; what is not text goes through unchanged."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_terminal() -> None:
    """Let stdout show control characters as escapes
    if it is a terminal; a file or pipe gets every byte."""
    if sys.stdout.isatty() and not isinstance(sys.stdout, PrintableStream):
        sys.stdout = PrintableStream(sys.stdout)


class PipeStream:
    """A stream to a pipe, text or bytes; once no process reads it,
    *at_end* is called and the rest is dropped."""

    def __init__(self, stream: Any, at_end: Callable[[], Any]) -> None:
        self._stream = stream
        self._at_end = at_end

    @property
    def buffer(self) -> PipeStream:
        return PipeStream(self._stream.buffer, self._at_end)

    def write(self, content: str | bytes) -> int:
        try:
            self._stream.write(content)
        except BrokenPipeError:
            self._drop()
        return len(content)

    def writelines(self, lines: Iterable[str | bytes]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def renewed(self, at_end: Callable[[], object]) -> PipeStream:
        """Return the stream with another *at_end*."""
        return PipeStream(self._stream, at_end)

    def _drop(self) -> None:
        # The null device also takes what is left in buffers,
        # which Python flushes again as the process ends.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        self._at_end()


def end_quietly() -> NoReturn:
    """End with the status that shells show of a program which a closed pipe ended."""
    sys.exit(128 + signal.SIGPIPE)


@contextlib.contextmanager
def closed_pipes(at_end: Callable[[], object]) -> Iterator[None]:
    """In a ``with`` statement, call *at_end* where stdout
    or stderr is a pipe that no process reads any more."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_watched(stream, at_end) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _watched(stream: Any, at_end: Callable[[], object]) -> Any:
    if isinstance(stream, PipeStream):
        return stream.renewed(at_end)
    try:
        mode = os.fstat(stream.fileno()).st_mode
    # In memory, or closed.
    except (AttributeError, OSError, ValueError):
        return stream
    return PipeStream(stream, at_end) if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else stream
