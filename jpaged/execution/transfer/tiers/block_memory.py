"""A part of the host's memory, of a fixed size, that keeps blocks of bytes."""

from __future__ import annotations

import contextlib
import mmap
import time
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import UInt8

from jpaged.execution.transfer.tiers.block_file import DamagedBlock, Speeds
from jpaged.memory.tiers import StoredBlock

Bytes: TypeAlias = UInt8[np.ndarray, " bytes"]

SAMPLE = 16 << 20
"""Bytes that are copied to measure the speed."""


class BlockMemory:
    """Keeps blocks in memory of its own, which the system gives it as it is written.

    One thread at a time may use it. There are no checksums: nothing else writes there.

    Args:
        num_bytes: its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, num_bytes)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self._names: dict[int, bytes] = {}

    def write(self, place: int, name: bytes, content: np.ndarray, stored: StoredBlock | None = None) -> None:
        """Write a block at an offset, over its old content."""
        self._names.pop(place, None)
        there = self._slice(place, content.size).reshape(content.shape)
        np.copyto(there, content)  # NumPy releases the GIL
        self._names[place] = name

    def read(self, place: int, name: bytes, num_bytes: int) -> Bytes:
        """Return a block that was written under this name.

        Raises:
            DamagedBlock: it was not.
        """
        if self._names.get(place) != name:
            raise DamagedBlock(f"the {num_bytes} bytes at {place} are not those that were written")
        return self._slice(place, num_bytes).copy()

    def will_read(self, place: int, num_bytes: int) -> None:
        """Do nothing: memory needs no notice."""

    def forget(self, place: int) -> None:
        """Invalidate what was written at an offset."""
        self._names.pop(place, None)

    def forget_all(self) -> None:
        """Invalidate all blocks written so far."""
        self._names = {}

    @property
    def writes(self) -> bool:
        """Tell whether this process writes: no other one can."""
        return True

    def fresh(self) -> tuple[bool, list[StoredBlock]]:
        """Return nothing: no other process writes here."""
        return False, []

    def give_back(self, place: int, num_bytes: int) -> None:
        """Return memory to the system; it is zeros then."""
        for stale in [other for other in self._names if place <= other < place + num_bytes]:
            del self._names[stale]
        if hasattr(mmap, "MADV_DONTNEED"):
            start = -(-place // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (place + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def measure(self) -> Speeds:
        """Copy a sample within memory, and forget it."""
        size = min(SAMPLE, self.num_bytes)
        sample, start = np.ones(size, np.uint8), time.perf_counter()
        self.write(0, b"sample", sample)
        written = time.perf_counter()
        self.read(0, b"sample", size)
        read = time.perf_counter()
        self.give_back(0, size)
        return Speeds(size / (written - start), size / (read - written), 0.0)

    def close(self) -> None:
        """Return the memory; nothing can be read or written any more."""
        self.forget_all()
        self.num_bytes = 0
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a slice is still held: the memory goes with it
            self._map.close()

    def _slice(self, place: int, num_bytes: int) -> Bytes:
        if not 0 <= place <= place + num_bytes <= self.num_bytes:
            raise ValueError(f"{num_bytes} bytes at place={place} are outside of the {self.num_bytes}")
        return self._bytes[place : place + num_bytes]


def to_device(num_bytes: int = SAMPLE) -> float:
    """Return the bytes a second that one device takes from the host, as measured with a sample."""
    sample = np.ones(num_bytes, np.uint8)
    jax.device_put(sample).block_until_ready()  # the first one sets things up
    start = time.perf_counter()
    jax.device_put(sample.copy()).block_until_ready()
    return num_bytes / (time.perf_counter() - start)
