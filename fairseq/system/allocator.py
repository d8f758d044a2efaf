"""Settings of the C library's allocator for returning freed memory."""

from __future__ import annotations

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Let glibc keep what torch frees, for torch to use again.

    By default a freed activation of a few megabytes goes back to the kernel, and the next one of
    its size is a thousand page faults. Blocks of 32 MB and more would have mappings of their own
    whatever the threshold, and arenas of other threads return what they free. Nothing happens
    elsewhere than with glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20), (_M_ARENA_MAX, 1)):
            mallopt(option, value)
