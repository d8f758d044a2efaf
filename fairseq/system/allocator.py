"""Settings of the C library's allocator for returning freed memory."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc allows no more on 64-bit machines


def keep_freed_memory() -> None:
    """Let glibc keep what torch frees, for torch to use again.

    By default a freed activation of a few megabytes goes back to the kernel, and the next one of its size is a
    thousand page faults: on a CPU, several thousand faults a training step. Elsewhere than with glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    # The C library of Alpine, musl, has no such function.
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(2**31 - 1))
    mallopt(_M_TOP_PAD, 64 << 20)
    # Other threads' arenas, such as the backward pass's, return what they free whatever the threshold: a gradient
    # of 12 MB then takes ten milliseconds to fill. All threads share the first one.
    mallopt(_M_ARENA_MAX, 1)
