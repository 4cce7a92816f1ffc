"""Copies the content of chosen blocks between devices and host, as bytes: the blocks of a saved state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from jpaged.execution.caches.base import Pool
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.transfer.block_mover import LAUNCH_BYTES, Batch, BlockBytes, BlockMover, block_bytes

Blocks: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""Block ids by replica and group."""


class BlockCopies:
    """Holds blocks that were copied out of the pool, and brings them to the host, in any thread.

    Args:
        launches: for each group its launches, with the number of blocks in each, padding left out.
    """

    def __init__(self, spec: PoolSpec, blocks: Blocks, launches: list[list[Batch]]) -> None:
        self._spec = spec
        self._blocks = blocks
        self._launches = launches

    def arrays(self) -> list[list[BlockBytes]]:
        """Return the bytes of each replica's blocks of each group, in the order of the request. Call it once only: it
        releases the copies."""
        shards = self._spec.shards
        found = [[] for _ in self._blocks]  # type: list[list[BlockBytes]]
        for group in range(len(self._spec.views)):
            parts = []
            while self._launches[group]:
                parts.append(block_bytes(np.asarray(self._launches[group].pop(0))))
            for replica, groups in enumerate(self._blocks):
                mine, count = slice(replica * shards, (replica + 1) * shards), len(groups[group])
                if parts:
                    found[replica].append(np.concatenate([part[mine] for part in parts], axis=1)[:, :count])
                else:
                    size = self._spec.layout.groups[group].block_bytes
                    found[replica].append(np.zeros((shards, 0, size), np.uint8))
        return found


class PoolBlocks:
    """Reads and writes blocks of every group, in launches of one size a group: one program each way.

    Args:
        mover: copies blocks out of the pool and back; all of its devices are this process's.
    """

    def __init__(self, mover: BlockMover) -> None:
        self._mover = mover
        self._spec = mover.spec
        self._sizes = [largest for largest, *_ in mover.sizes]

    def prepare(self) -> None:
        """Compile the programs of `read`, in any thread: it takes seconds, and no engine should wait for it."""
        for group, size in enumerate(self._sizes):
            self._mover.prepare_gather(group, size)()

    def read(self, pool: Pool, blocks: Blocks) -> BlockCopies:
        """Copy blocks out of the pool; when this returns, the pool may be written again.

        Devices hold about `LAUNCH_BYTES` of copies at most, or a launch of each group; these go on to the host
        afterwards.
        """
        launches: list[list[Batch]] = [[] for _ in self._sizes]
        for group, size in enumerate(self._sizes):
            mine, moved, ids = launches[group], 0, [groups[group] for groups in blocks]
            most = max(1, LAUNCH_BYTES // (size * self._spec.layout.groups[group].block_bytes * len(launches)))
            for start in range(0, max(map(len, ids)), size):
                if len(mine) - moved >= most:
                    mine[moved] = np.asarray(mine[moved])
                    moved += 1
                launch = self._mover.gather(pool, group, [own[start : start + size] for own in ids], size)
                launch.copy_to_host_async()
                mine.append(launch)
        jax.block_until_ready(launches)
        return BlockCopies(self._spec, blocks, launches)

    def write(self, pool: Pool, blocks: Blocks, contents: Sequence[Sequence[BlockBytes]]) -> Pool:
        """Write blocks into the pool, which is donated, and return it.

        Args:
            contents: what `BlockCopies.arrays` gave, for each replica and group; its order is that of `blocks`.
        """
        for group, size in enumerate(self._sizes):
            ids, rows = [groups[group] for groups in blocks], [groups[group] for groups in contents]
            for start in range(0, max(map(len, ids)), size):
                own, part = (
                    [some[start : start + size] for some in ids],
                    [all_[:, start : start + size] for all_ in rows],
                )
                pool = self._mover.write(pool, group, own, part, size)
        return pool
