"""A command's process: a user's mistake is one line on stderr, and what its exit code is."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from fairseq.errors import UserError, is_out_of_memory, out_of_memory_message, with_flags
from fairseq.system.allocator import keep_freed_memory
from fairseq.system.files import FULL, removing_empty_folders
from fairseq.system.terminal import printable, write_line_by_line


@contextlib.contextmanager
def as_program() -> Iterator[None]:
    """Context of a command's work: a user's mistake in it is one line on stderr and exit code 2.

    Once nobody reads its output, as behind ``| head``, it ends as SIGPIPE ends other programs.
    """
    write_line_by_line()
    keep_freed_memory()
    # A shell's background job ignores interrupts, and continues to.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Until here an interrupt ended the process without a traceback: imports are done now.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with removing_empty_folders():
            yield
        sys.stdout.flush()
    except UserError as error:
        fail(error.args[0])
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(out_of_memory_message(error))
    except KeyboardInterrupt:
        # As shells number a process that SIGINT ended.
        sys.exit(130)
    except BrokenPipeError:
        # Without Python's own end, at which what is left in stdout's buffer would fail again.
        os._exit(128 + signal.SIGPIPE)
    except OSError as error:
        # Paths that no system call takes are a user's mistake, whichever file they name.
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES) and error.filename is not None:
            name = str(error.filename)
            fail(f"{name if len(name) <= 80 else f'{name[:80]}…'}: {error.strerror}; give another path")
        # Errors without a file name are stdout's.
        if error.filename is not None or error.errno not in FULL:
            raise
        print(f"{Path(sys.argv[0]).name}: error: the output cannot be written ({error.strerror})", file=sys.stderr)
        os._exit(2)


def fail(message: str) -> NoReturn:
    """Print *message* with flags for the names in backticks
    as one line on stderr, and exit with code 2."""
    # What a message quotes from a file may hold line ends.
    line = printable(" ".join(with_flags(message).split()))
    print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr, flush=True)
    sys.exit(2)
