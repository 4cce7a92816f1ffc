"""Copies blocks from the pool for the tiers, and blocks read from tiers into the pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from jpaged.execution.caches.base import Pool
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.memory.tiers import TierFill, TierWrite
from jpaged.scheduling.work import FROM_TIERS, TO_TIERS


class ToTiers(PoolWork):
    """Hands blocks to the tiers' threads. Replicas have no tiers."""

    kind: ClassVar[str] = TO_TIERS

    def __init__(self, context: WorkContext) -> None:
        self._mover = context.mover
        self.threads = context.tiers

    def calls(self, each: Sequence[Sequence[TierWrite]]) -> Iterable[tuple[Sequence[TierWrite]]]:
        yield from ((writes,) for writes in each if writes)

    def run(self, pool: Pool, writes: Sequence[TierWrite]) -> Pool:
        """Start copying blocks out of the pool, each of which is written to its tiers when it is there.

        A block that goes to several tiers is copied once.
        """
        groups: dict[int, dict[int, list[TierWrite]]] = defaultdict(dict)
        for write in writes:
            groups[write.group].setdefault(write.block, []).append(write)
        for group, of_blocks in groups.items():
            blocks = list(of_blocks)
            for start, size in self._mover.launches(group, len(blocks)):
                some = blocks[start : start + size]
                launch = self._mover.gather(pool, group, [some], size)
                rows: dict[int, list[tuple[int, TierWrite]]] = defaultdict(list)
                for row, block in enumerate(some):
                    for write in of_blocks[block]:
                        rows[write.tier].append((row, write))
                for tier, mine in rows.items():
                    self.threads[tier].write(launch, mine)
        return pool

    def close(self) -> None:
        """End the threads and release their memory and files."""
        for thread in self.threads:
            thread.close()


class FromTiers(PoolWork):
    """Fills blocks of the pool with those that the tiers' threads have read."""

    kind: ClassVar[str] = FROM_TIERS

    def __init__(self, context: WorkContext) -> None:
        self._mover = context.mover

    def calls(self, each: Sequence[Sequence[TierFill]]) -> Iterable[tuple[Sequence[TierFill]]]:
        yield from ((fills,) for fills in each if fills)

    def run(self, pool: Pool, fills: Sequence[TierFill]) -> Pool:
        groups: dict[int, list[TierFill]] = defaultdict(list)
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
