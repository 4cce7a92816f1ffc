"""Allocates memory for the parameters of CPU devices in large pieces, as Linux gives huge pages only to those."""

from __future__ import annotations

import math
import threading

import numpy as np

_PIECE_BYTES = 64 << 20
ALIGNMENT = 64
"""Bytes: a CPU device takes memory that begins at a multiple of this as its own, without a copy."""


class HostMemory:
    """Cuts arrays out of large pieces, each of which is freed with the last of its arrays. Thread-safe.

    A first touch of memory costs a page fault, and pages of 4 KiB make reading 500 MB of weights wait for the
    kernel most of the time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised array like `numpy.empty`, aligned to `ALIGNMENT`."""
        size = math.prod(shape) * dtype.itemsize
        if size > _PIECE_BYTES // 4:
            return _aligned(np.empty(size + ALIGNMENT, np.uint8))[:size].view(dtype).reshape(shape)
        with self._lock:
            if size > len(self._rest):
                self._rest = _aligned(np.empty(_PIECE_BYTES, np.uint8))
            taken, self._rest = self._rest[:size], _aligned(self._rest[size:])
        return taken.view(dtype).reshape(shape)


def _aligned(memory: np.ndarray) -> np.ndarray:
    return memory[-memory.ctypes.data % ALIGNMENT :]
