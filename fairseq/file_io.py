"""``fairseq.file_io``: files of this machine, under the names that plug-ins open them by."""

from __future__ import annotations

import functools
import os
import shutil


def cached_path(path: object, *unused: object) -> str:
    """*path*: nothing is downloaded."""
    return str(path)


class PathManager:
    """Files of this machine, under the names of iopath's functions."""

    open, copy, rm = staticmethod(open), staticmethod(shutil.copyfile), staticmethod(os.remove)
    exists, isfile, isdir = staticmethod(os.path.exists), staticmethod(os.path.isfile), staticmethod(os.path.isdir)
    ls, get_local_path = staticmethod(os.listdir), staticmethod(cached_path)
    mkdirs = staticmethod(functools.partial(os.makedirs, exist_ok=True))
    rename = staticmethod(os.replace)
    opena = staticmethod(open)  # what is written is written when it returns

    @staticmethod
    def async_close() -> bool:
        """Return that nothing is left to be written."""
        return True

    @staticmethod
    def supports_rename(path: object) -> bool:
        """Return that *path* can be renamed."""
        return True
