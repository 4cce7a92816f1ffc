"""Keeps swapped blocks in host memory (PagedAttention, section 4.5), for each replica its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Int

from jpaged.execution.caches.base import Pool
from jpaged.execution.mesh import pool_sharding
from jpaged.execution.transfer.block_mover import Batch, BlockBytes, BlockMover, block_bytes

Moves: TypeAlias = Sequence[Int[np.ndarray, "moves 3"]]
"""Blocks that move, of each replica: group, block of the pool, block in host memory."""

PINNED = "pinned_host"


class HostStore:
    """Keeps the content of swapped blocks, in pinned memory where the devices can address it.

    A launch's blocks stay together in one array, which is freed when none of them is needed any more.

    Args:
        mover: copies blocks out of the pool and back.
    """

    def __init__(self, mover: BlockMover) -> None:
        self._mover = mover
        kinds = {memory.kind for memory in mover.mesh.local_devices[0].addressable_memories()}
        self._pinned = pool_sharding(mover.mesh).with_memory_kind(PINNED) if PINNED in kinds else None
        self._place: dict[tuple[int, int, int], tuple[Batch, int]] = {}  # by replica, group and block

    def __len__(self) -> int:
        """Return how many blocks are held."""
        return len(self._place)

    def forget(self, dropped: Sequence[Int[np.ndarray, "blocks 2"]]) -> None:
        """Release blocks that will not be swapped in, of each replica: their groups and numbers."""
        for replica, blocks in enumerate(dropped):
            for group, block in blocks.tolist():
                del self._place[replica, group, block]

    def forget_all(self) -> None:
        """Release all blocks."""
        self._place.clear()

    def swap_out(self, pool: Pool, each: Moves) -> None:
        """Start copying blocks to the host.

        Raises:
            RuntimeError: a device block is out of range (JAX would clamp it silently).
        """
        for group, mine in self._by_group(each):
            for start, size in self._mover.launches(group, max(map(len, mine))):
                some = [moves[start : start + size] for moves in mine]
                batch = self._kept(self._mover.gather(pool, group, [moves[:, 1].tolist() for moves in some], size))
                for replica, moves in enumerate(some):
                    for row, block in enumerate(moves[:, 2].tolist()):
                        self._place[replica, group, block] = batch, row

    def swap_in(self, pool: Pool, each: Moves) -> Pool:
        """Copy blocks back into the pool, which is donated, and return it; the host then forgets them.

        Raises:
            RuntimeError: a device block is out of range (JAX would drop it silently).
        """
        for group, mine in self._by_group(each):
            batches: dict[int, Batch] = {}
            targets: dict[int, list[list[int]]] = {}
            for replica, moves in enumerate(mine):
                self._mover.check(group, moves[:, 1].tolist())
                for _, device_block, block in moves.tolist():
                    batch, row = self._place.pop((replica, group, block))
                    if id(batch) not in batches:
                        batches[id(batch)] = batch
                        nowhere = [self._mover.nowhere(group)] * batch.shape[1]
                        targets[id(batch)] = [list(nowhere) for _ in mine]
                    targets[id(batch)][replica][row] = device_block
            for key, batch in batches.items():
                pool = self._mover.scatter(pool, group, batch, targets[key])
        return pool

    def contents(self, replica: int, blocks: Sequence[Sequence[int]]) -> list[BlockBytes]:
        """Return the bytes of some blocks of each group, in the order of `blocks`."""
        spec, read, found = self._mover.spec, dict[int, BlockBytes](), []
        shards = slice(replica * spec.shards, (replica + 1) * spec.shards)
        for group, layout in enumerate(spec.layout.groups):
            rows = np.empty((spec.shards, len(blocks[group]), layout.block_bytes), np.uint8)
            for place, block in enumerate(blocks[group]):
                batch, row = self._place[replica, group, block]
                if id(batch) not in read:
                    read[id(batch)] = block_bytes(np.asarray(batch))
                rows[:, place] = read[id(batch)][shards, row]
            found.append(rows)
        return found

    def put(self, each: Sequence[Sequence[Sequence[int]]], contents: Sequence[Sequence[BlockBytes]]) -> None:
        """Hold the bytes of blocks that another store had, by replica and group; none of them is here yet."""
        for group in range(len(self._mover.sizes)):
            mine, rows = [groups[group] for groups in each], [groups[group] for groups in contents]
            for start, size in self._mover.launches(group, max(map(len, mine))):
                batch = self._mover.batch(group, [part[:, start : start + size] for part in rows], size)
                there = batch if self._pinned is None else jax.device_put(batch, self._pinned)
                for replica, blocks in enumerate(mine):
                    for row, block in enumerate(blocks[start : start + size]):
                        self._place[replica, group, block] = there, row

    def _kept(self, batch: jax.Array) -> Batch:
        return jax.device_get(batch) if self._pinned is None else jax.device_put(batch, self._pinned)

    def _by_group(self, each: Moves) -> list[tuple[int, list[Int[np.ndarray, "moves 3"]]]]:
        groups = dict.fromkeys(group for moves in each for group in moves[:, 0].tolist())
        return [(group, [moves[moves[:, 0] == group] for moves in each]) for group in groups]
