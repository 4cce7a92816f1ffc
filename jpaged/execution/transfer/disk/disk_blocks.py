"""Copies blocks from the pool for the disk, and blocks read from the disk into the pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from jpaged.execution.caches.base import Pool
from jpaged.execution.transfer.disk.block_thread import BlockThread
from jpaged.execution.transfer.host_store import HostStore
from jpaged.memory.disk import DiskFill, DiskWrite


class DiskBlocks:
    """Hands evicted blocks to the disk's thread, and the blocks that it read to the pool.

    Args:
        host: has the programs that move blocks.
        thread: writes and reads the file.
    """

    def __init__(self, host: HostStore, thread: BlockThread) -> None:
        self._host = host
        self.thread = thread

    def write(self, pool: Pool, writes: Sequence[DiskWrite]) -> None:
        """Start copying blocks out of the pool, each of which is written to disk when it is there."""
        groups: dict[int, list[DiskWrite]] = defaultdict(list)
        for write in writes:
            groups[write.group].append(write)
        for group, mine in groups.items():
            start = 0
            for launch, count in self._host.copied_out(pool, group, [write.block for write in mine]):
                self.thread.write(launch, mine[start : start + count])
                start += count

    def fill(self, pool: Pool, fills: Sequence[DiskFill]) -> Pool:
        """Write the read blocks into the pool, which is donated, and return it."""
        groups: dict[int, list[DiskFill]] = defaultdict(list)
        for fill in fills:
            groups[fill.group].append(fill)
        for group, mine in groups.items():
            blocks, contents = [fill.block for fill in mine], [fill.content for fill in mine]
            pool = self._host.fill(pool, group, blocks, contents)
        return pool

    def close(self) -> None:
        """End the thread and release the file."""
        self.thread.close()
