"""The one place that asks the file system what is under a path."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from fairseq.errors import UserError

# Nothing can be under such a path. Anything else, as a folder that this user may not enter, leaves
# the answer open.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def exists(path: str | Path) -> bool:
    """Return whether *path* leads to anything; UserError if the system does not tell."""
    return _mode(path) is not None


def is_file(path: str | Path) -> bool:
    """Return whether *path* leads to a regular file; UserError if the system does not tell."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: str | Path) -> bool:
    """Return whether *path* leads to a folder; UserError if the system does not tell."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def entries(folder: str | Path) -> list[Path]:
    """Return what is in *folder*, by name; UserError if it cannot be listed."""
    try:
        return sorted(Path(folder).iterdir())
    except OSError as error:
        raise _unknown(folder, error) from None


def _mode(path: str | Path) -> int | None:
    try:
        return os.stat(path).st_mode
    except ValueError:  # a NUL character, or surrogates that no file name has
        return None
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise _unknown(path, error) from None


def _unknown(path: str | Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror}); check the path and the permissions of its folders")
