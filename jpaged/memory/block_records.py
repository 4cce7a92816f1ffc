"""Blocks as records: the state, owners, tokens and last need of every block of a group in one array."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class BlockState(IntEnum):
    """What a block is at the moment; `NONE`: its large page does not belong to the group."""

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
        request: id of the request that owns it, one of them where several do; -1 = nobody does. A pinned prefix has
            minus 1 minus the id of its sequence.
        sequence: id of that request's sequence that owns it; -1 = nobody does.
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

Rows = npt.NDArray[np.void]
Indices = npt.NDArray[np.int64]


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy that nobody can write."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def zero_rows(number: int) -> Rows:
    """Return records of blocks whose pages belong to other groups."""
    rows = np.zeros(number, ROW)
    rows["request"] = rows["sequence"] = -1
    return rows
