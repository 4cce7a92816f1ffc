"""What a process of the tests holds, and how it gives that back between files."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

MOST_BYTES = 2 << 30
MOST_MAPPINGS = 16_000
"""What may be added before programs are given up. A process may have 65,530 mappings: LLVM ends it where it gets no
more, and those of one program are between 6 and 80."""


def resident_bytes() -> int:
    """Return the memory of this process, or 0 where the system does not say."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def num_mappings() -> int:
    """Return how many ranges of addresses this process has, or 0 where the system does not say."""
    with suppress(OSError):
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    return 0


class Released:
    """A plugin that gives programs up at the end of a file, where they have become many.

    JAX keeps every program that it has compiled, 2 MB each, as long as the function lives, which for its own is for
    ever: a worker of a whole run came to 7 GB. What is needed again is traced again, and read from the cache on disk.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_mappings: int = MOST_MAPPINGS) -> None:
        self._most_bytes, self._most_mappings = most_bytes, most_mappings
        self._left: tuple[int, int] | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None):
        try:
            return (yield)
        finally:
            if nextitem is not None and nextitem.path != item.path:
                self.release()

    def release(self) -> bool:
        """Give up programs if what was left the last time has grown by too much; say whether it had."""
        found = resident_bytes(), num_mappings()
        had_bytes, had_mappings = self._left = self._left or found
        if found[0] - had_bytes < self._most_bytes and found[1] - had_mappings < self._most_mappings:
            return False
        if jax := sys.modules.get("jax"):
            jax.clear_caches()
        gc.collect()
        with suppress(OSError, AttributeError):  # the C library keeps what is freed, and only glibc can be asked for it
            ctypes.CDLL(None).malloc_trim(0)
        self._left = resident_bytes(), num_mappings()
        return True
