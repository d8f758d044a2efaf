"""Mistakes a user can mend: one line, exit code 2, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What is wrong with the input, and what to do about it, in one line.

    The message names the flag or file. The commands print it to stderr and exit with code 2; anything else
    that escapes a command is a bug and shows its traceback.
    """


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The names of *known* closest to *name*, as the end of an error message."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(names)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether *error* says that host or device memory ran out."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


def out_of_memory_message(error: BaseException) -> str:
    """What to tell a user whose run did not fit into memory."""
    where = "GPU" if "CUDA" in str(error) or "HIP" in str(error) else "host"
    return (
        f"out of {where} memory: lower --max-tokens or --batch-size (and raise --update-freq to keep the same batch), "
        "--mem-len or --softmax-batch in evaluation"
    )
