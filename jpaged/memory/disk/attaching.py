"""Gives a sequence a prefix of which the pool has one part and the other was read from disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import BlockTables
from jpaged.memory.disk.moves import DiskFill
from jpaged.memory.ownership import Ownership
from jpaged.memory.pages import Time
from jpaged.memory.prefix_cache import PrefixCache, prefix_tables

if TYPE_CHECKING:
    import numpy as np


def attach_with_disk(
    allocator: BlockAllocator,
    cache: PrefixCache,
    ownership: Ownership,
    sequence: BlockTables,
    found: list[list[int | None]],
    length: int,
    staged: Mapping[tuple[int, bytes], np.ndarray],
) -> list[DiskFill] | None:
    """Attach a prefix of `length` tokens to a sequence without blocks; return what the blocks that it took for what was
    read are to be filled with, or None, with nothing attached, when the pool is short of blocks.

    These blocks are known to the prefix cache from now on, so they have to be filled before anything of this step runs.

    Args:
        found: for each group, the block of the pool for each logical one, None where it has none.
        staged: bytes that were read, by group and digest.
    """
    groups = sequence.request.groups
    active = [
        [i for run in policy.active_blocks(length, size) for i in run] for policy, size in groups
    ]  # whatever else was read is not needed
    missing = [[i for i in mine if found[g][i] is None] for g, mine in enumerate(active)]
    held = [(g, block) for g, mine in enumerate(active) for i in mine if (block := found[g][i]) is not None]
    for g, block in held:  # else they could be evicted for those that are taken
        allocator.share(g, block)
    taken = allocator.take([len(mine) for mine in missing], sequence.request.association)
    if taken is None:
        time = Time(ownership.next_tick(), 0)
        for g, block in held:
            allocator.release(g, block, time, keep=True)
        return None
    fills = []
    for g, mine in enumerate(missing):
        links = cache.chain(sequence, g).links
        for i, block in zip(mine, taken[g], strict=True):
            found[g][i] = block
            fills.append(DiskFill(g, block, staged[g, links[i].digest]))
            held.append((g, block))
            if cache.twin(g, links[i]) is None:
                cache.insert(g, block, links[i])
    ownership.attach(sequence, prefix_tables(groups, found, length), length)
    for g, block in held:
        allocator.release(g, block, Time(0, 0), keep=True)  # the time is never used: the sequence owns it too
    return fills
