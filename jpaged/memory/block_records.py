"""Blocks as records: the state, owners, tokens and last need of every block of a group in one array."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jpaged.memory.versioned_array import Rows, Snapshot


class BlockState(IntEnum):
    """State of a block; `NONE`: its large page does not belong to the group."""

    NONE = 0
    EMPTY = 1
    CACHED = 2
    USED = 3
    SHARED = 4


class Block(NamedTuple):
    """One block.

    Attributes:
        state: shared is used by more than one sequence.
        owners: number of sequences that own it.
        tokens: tokens it holds; a recurrent state counts as a whole block of them.
        prefix: a number that blocks have in common whose tokens begin with the same first block, where block size and
            salt are the same too; 0 = not known, as without prefix caching.
        request: id of the request that owns it, one of them if several do; -1 = no owner. A pinned prefix has
            minus 1 minus the id of its sequence.
        sequence: id of that request's sequence that owns it; -1 = no owner.
        last_need: for a cached block, `MemoryMap.clock` when it was needed last; 0 for others.
    """

    state: BlockState
    owners: int
    tokens: int
    prefix: int
    request: int
    sequence: int
    last_need: int


ROW = np.dtype(
    [
        ("state", "<i4"),
        ("owners", "<i4"),
        ("tokens", "<i4"),
        ("prefix", "<u4"),
        ("request", "<i8"),
        ("sequence", "<i8"),
        ("last_need", "<i8"),
    ]
)
"""A block as a record of 40 bytes without gaps; the fields are those of `Block`."""


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only copy."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def zero_rows(number: int) -> Rows:
    """Return records of blocks whose pages belong to other groups."""
    rows = np.zeros(number, ROW)
    rows["request"] = rows["sequence"] = -1
    return rows


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
    records: Snapshot = field(repr=False)

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
        """Return how many blocks without an owner keep their content."""
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
