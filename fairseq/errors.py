"""Errors caused by the user's input: one line, exit code 2, no traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

LONGEST = 1500
_SETTING = re.compile(r"`(\w+)`")


class UserError(Exception):
    """Invalid input, described in one line with the remedy.

    The message names the file, or the setting or argument in backticks:
    ```dropout` 7.0: must be less than 1``. As text it has the names that Python code sets
    (``dropout 7.0: …``). The commands print :attr:`with_flags` (``--dropout 7.0: …``) to stderr and
    exit with code 2; any other exception is a bug and shows its traceback. What is quoted from a
    file may be of any length: the message is cut.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= LONGEST else f"{message[:LONGEST]}…")

    def __str__(self) -> str:
        return _SETTING.sub(r"\1", self.args[0])

    @property
    def with_flags(self) -> str:
        """The message for a command line, and for whatever reads settings in the form of flags."""
        return with_flags(self.args[0])


class SettingError(UserError):
    """An invalid value of a setting, or settings that contradict each other."""


def with_flags(text: str) -> str:
    """*text* with flags in place of the names in backticks: ```batch_size``` → ``--batch-size``."""
    return _SETTING.sub(lambda name: "--" + name[1].replace("_", "-"), text)


def read_failure(error: OSError) -> str:
    """The reason why a file could not be read, for an error message after its path."""
    if isinstance(error, FileNotFoundError):
        return "file not found"
    return f"cannot be read ({error.strerror})"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """The names in *known* closest to *name*, worded as the end of an error message."""
    names = sorted(known)
    # A family, such as gpt3, is not a mistyped member of another one.
    family = [candidate for candidate in names if len(name) > 1 and name.lower() in candidate.lower()]
    close = difflib.get_close_matches(name, family or names, n=count, cutoff=0.5 if family else 0.6)
    close = close or family[: 2 * count]
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(names)


def counted(number: int, noun: str) -> str:
    """``1 process``, ``2 processes``, ``3 updates``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def first_of(names: Sequence[str], count: int = 3) -> str:
    """The first *count* of *names*, for a message."""
    return ", ".join(names[:count]) + (", …" if len(names) > count else "")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether *error* is an out-of-memory error of the host or the device."""
    return isinstance(error, MemoryError) or any(
        words in str(error)
        for words in ("out of memory", "can't allocate memory", "not enough memory", "size calculation overflowed")
    )


def out_of_memory_message(error: BaseException, doing: str = "") -> str:
    """Error message of a run that ran out of memory while
    *doing* something, with the settings that reduce it."""
    # The CPU's allocator uses other words, and Python another class.
    where = "GPU" if "out of memory" in str(error) and not isinstance(error, MemoryError) else "host"
    happened = f"out of {where} memory {doing}".rstrip()
    return (
        f"{happened}: raise `batch_chunk`, which keeps the updates, or lower `max_tokens` or `batch_size`; in "
        "evaluation lower `mem_len` or `softmax_batch`; or choose a smaller `arch`"
    )
