"""The blocks of one layer group at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jpaged.memory.block_records import BlockState, Rows
from jpaged.memory.live_records import Version


@dataclass(frozen=True, eq=False)
class GroupMap:
    """The blocks of one layer group; block ``b`` lies in large page ``b // blocks_per_page``.

    Attributes:
        name: the group's name.
        block_size: tokens a block has room for.
        block_bytes: bytes of a block on one device, padding included.
        blocks_per_page: blocks in a large page of this group.
        records: the records of `blocks`.
    """

    name: str
    block_size: int
    block_bytes: int
    blocks_per_page: int
    records: Version = field(repr=False)

    @property
    def num_blocks(self) -> int:
        """Return how many blocks there would be if this group had the whole pool."""
        return len(self.records)

    @property
    def blocks(self) -> Rows:
        """Return a record of dtype `ROW` for each of `num_blocks` blocks; the array is read-only."""
        return self.records.rows

    def count(self, *states: BlockState) -> int:
        """Return how many blocks are in one of `states`."""
        return int(np.isin(self.blocks["state"], states).sum())

    @property
    def used(self) -> int:
        """Return how many blocks have an owner, shared ones among them."""
        return self.count(BlockState.USED, BlockState.SHARED)

    @property
    def shared(self) -> int:
        """Return how many blocks have several owners."""
        return self.count(BlockState.SHARED)

    @property
    def cached(self) -> int:
        """Return how many blocks nobody owns whose content is kept."""
        return self.count(BlockState.CACHED)

    @property
    def empty(self) -> int:
        """Return how many blocks of this group's large pages hold nothing."""
        return self.count(BlockState.EMPTY)

    @property
    def used_tokens(self) -> int:
        """Return how many tokens the used blocks hold, each shared one once."""
        rows = self.blocks
        return int(rows["tokens"][rows["state"] >= BlockState.USED].sum())
