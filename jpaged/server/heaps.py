"""Limits the heaps of the C library, so that a server's memory does not grow with the kinds of its requests."""

from __future__ import annotations

import ctypes
import os
import sys

MOST_HEAPS = 4
"""Heaps that threads share. glibc would make eight for each core."""
_M_ARENA_MAX = -8
"""Number of the setting in glibc's malloc.h."""


def limit_heaps() -> bool:
    """Let all threads allocate from `MOST_HEAPS` heaps; tell whether the C library could be asked.

    Each heap keeps the most that it ever held, in pieces that a later request of another shape cannot use, and a server
    starts threads for grammars, templates and long texts. Call it before the process starts threads that live long.
    The environment variable MALLOC_ARENA_MAX, where set, is followed instead.
    """
    if sys.platform != "linux" or "MALLOC_ARENA_MAX" in os.environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and mallopt(_M_ARENA_MAX, MOST_HEAPS) == 1
