"""Puts arrays on a CPU into large pages of memory, which Linux provides on request.

A product of few rows reads a matrix once, at the speed of memory; in pages of four kilobytes a processor looks up where
each of them lies, and what it fetches ahead ends at each one's end.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import jax

PAGE_BYTES = 1 << 21
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_COLLAPSE = 25
"""Linux' MADV_COLLAPSE (since 6.1): put what is there together at once. Older ones do it in time, or not at all."""


def use_large_pages(arrays: Iterable[jax.Array]) -> None:
    """Ask for large pages where arrays of a CPU lie; no number in them changes.

    Arrays that are smaller than a page are skipped. Neighbouring memory may end up in the same page as an array.
    """
    if _ADVICE is None or not sys.platform.startswith("linux"):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes, advise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    for array in arrays:
        if array.nbytes < PAGE_BYTES:
            continue
        begin = array.unsafe_buffer_pointer()
        for page in range(begin // PAGE_BYTES * PAGE_BYTES, begin + array.nbytes, PAGE_BYTES):
            advise(page, PAGE_BYTES, _ADVICE)
            advise(page, PAGE_BYTES, _COLLAPSE)
