"""File systems that a case mounts for its own process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

NEW_MOUNTS, PRIVATE, READ_ONLY, NO_EXECUTION = 0x20000, 0x44000, 1, 8  # of unshare(2) and mount(2)
_libc = ctypes.CDLL(None, use_errno=True)


def mount(kind: str) -> Callable[[], None]:
    """A function that mounts a file system of *kind* at ``place`` in the current folder, for this
    process alone.

    ``read-only``, ``full`` (but for one page), or ``noexec``; files of ``place`` are copied into
    it.
    """

    def change() -> None:
        files = {path: path.read_bytes() for path in Path("place").rglob("*") if path.is_file()}
        _checked(_libc.unshare(NEW_MOUNTS))
        _mount("none", "/", "", PRIVATE, "")
        size = 4096 * (2 + sum(2 + len(content) // 4096 for content in files.values()))
        _mount(
            "tmpfs", "place", "tmpfs", NO_EXECUTION if kind == "noexec" else 0, f"size={size}" if kind == "full" else ""
        )
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if kind == "read-only":
            _mount("none", "place", "", 0x20 | READ_ONLY, "")

    return change


def why_not() -> str:
    """The reason why this process may not mount file systems; empty if it may."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _checked(_libc.unshare(NEW_MOUNTS))
            _mount("none", "/", "", PRIVATE, "")
            _mount("tmpfs", "/mnt", "tmpfs", 0, "")
            code = 0
        finally:
            os._exit(code)
    return "mounting is not permitted" if os.waitpid(pid, 0)[1] else ""


def _mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    _checked(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()))


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
