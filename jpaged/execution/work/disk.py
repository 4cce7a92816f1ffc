"""Copies blocks from the pool for the disk, and blocks read from the disk into the pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from jpaged.execution.caches.base import Pool
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.memory.disk import DiskFill, DiskWrite
from jpaged.scheduling.work import FROM_DISK, TO_DISK


class ToDisk(PoolWork):
    """Hands evicted blocks to the disk's thread. Replicas have no disk."""

    kind: ClassVar[str] = TO_DISK

    def __init__(self, context: WorkContext) -> None:
        self._mover = context.mover
        self.thread = context.disk

    def calls(self, each: Sequence[Sequence[DiskWrite]]) -> Iterable[tuple[Sequence[DiskWrite]]]:
        yield from ((writes,) for writes in each if writes)

    def run(self, pool: Pool, writes: Sequence[DiskWrite]) -> Pool:
        """Start copying blocks out of the pool, each of which is written to disk when it is there."""
        assert self.thread is not None, "an engine without a disk was asked to write to it"
        groups: dict[int, list[DiskWrite]] = defaultdict(list)
        for write in writes:
            groups[write.group].append(write)
        for group, mine in groups.items():
            for start, size in self._mover.launches(group, len(mine)):
                some = mine[start : start + size]
                launch = self._mover.gather(pool, group, [[write.block for write in some]], size)
                self.thread.write(launch, some)
        return pool

    def close(self) -> None:
        """End the thread and release the file."""
        if self.thread is not None:
            self.thread.close()


class FromDisk(PoolWork):
    """Fills blocks of the pool with those that the disk's thread has read."""

    kind: ClassVar[str] = FROM_DISK

    def __init__(self, context: WorkContext) -> None:
        self._mover = context.mover

    def calls(self, each: Sequence[Sequence[DiskFill]]) -> Iterable[tuple[Sequence[DiskFill]]]:
        yield from ((fills,) for fills in each if fills)

    def run(self, pool: Pool, fills: Sequence[DiskFill]) -> Pool:
        groups: dict[int, list[DiskFill]] = defaultdict(list)
        for fill in fills:
            groups[fill.group].append(fill)
        shards = self._mover.spec.shards
        for group, mine in groups.items():
            self._mover.check(group, [fill.block for fill in mine])
            for start, size in self._mover.launches(group, len(mine)):
                some = mine[start : start + size]
                rows = np.stack([fill.content.reshape(shards, -1) for fill in some], axis=1)
                pool = self._mover.write(pool, group, [[fill.block for fill in some]], [rows], size)
        return pool
