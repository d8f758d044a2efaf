"""Settings of the C library's allocator for returning freed memory."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Let glibc keep what torch frees, for torch to use again.

    By default a freed activation of a few megabytes goes back to the kernel, and the next one of
    its size is a thousand page faults: on a CPU, several thousand faults a training step. Elsewhere
    than with glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    # The C library of Alpine, musl, has no such function.
    except (OSError, AttributeError):
        return
    # Blocks of 32 MB and more would otherwise have mappings
    # of their own, whatever the threshold of their size.
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
    mallopt(_M_TOP_PAD, 64 << 20)
    # Other threads' arenas, such as the backward pass's,
    # return what they free whatever the threshold: a gradient of 12 MB
    # then takes ten milliseconds to fill. All threads share the first one.
    mallopt(_M_ARENA_MAX, 1)
