"""Request and result types of a tier's store, and its interface."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from jpaged.memory.tiers.index import StoredBlock

if TYPE_CHECKING:
    import numpy as np


class TierWrite(NamedTuple):
    """A block of the pool whose content is copied out before anything of the step changes it, and written to a tier.

    Attributes:
        place: offset in the tier's store, in bytes.
        name: stands for the content; a read that asks for another name finds nothing.
        tier: number of the tier.
        stored: the block there; None = nothing but the name is known of it.
    """

    group: int
    block: int
    place: int
    name: bytes
    tier: int = 0
    stored: StoredBlock | None = None


class TierFill(NamedTuple):
    """A block of the pool to be filled with bytes from a tier, before the step's block copies and chunks.

    Attributes:
        content: the bytes of all shards, one shard's after another's.
        tier: number of the tier that they come from.
    """

    group: int
    block: int
    content: np.ndarray
    tier: int = 0


class TierRead:
    """Blocks to be read, and the result. The store's thread fills it in until `is_done`; other threads read it then.

    Args:
        blocks: the blocks to read.
        names: for each block, the name under which it was written.

    Attributes:
        contents: bytes of each block that was read, by group and digest.
        damaged: blocks whose bytes are not those that were written.
        seconds: time that reading took, without the wait for it to begin.
        is_cancelled: whether no request waits for it any more.
    """

    def __init__(self, blocks: Sequence[StoredBlock], names: Sequence[bytes]) -> None:
        self.blocks = blocks
        self.names = names
        self.contents: dict[tuple[int, bytes], np.ndarray] = {}
        self.damaged: list[StoredBlock] = []
        self.seconds = 0.0
        self.is_cancelled = False
        self._done = threading.Event()

    @property
    def num_bytes(self) -> int:
        """Return the size of all blocks."""
        return sum(block.num_bytes for block in self.blocks)

    @property
    def is_done(self) -> bool:
        """Tell whether nothing more will change."""
        return self._done.is_set()

    def finish(self) -> None:
        """Mark the read as done; nothing changes after it."""
        self._done.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the end at most so long; return whether it has come."""
        return self._done.wait(seconds)


class BlockStore(Protocol):
    """Moves blocks to a tier and back, one request after another, in order."""

    @property
    def is_open(self) -> bool:
        """Tell whether it still works."""

    @property
    def writes(self) -> bool:
        """Tell whether this process writes it; `fresh` may make it the writer."""

    @property
    def num_queued_bytes(self) -> int:
        """Return the bytes that were copied out of the pool and are not written yet."""

    def read(self, read: TierRead) -> None:
        """Begin to read blocks; returns at once."""

    def forget_all(self) -> None:
        """Drop the writes that wait, and forget all written blocks."""

    def fresh(self) -> tuple[bool, list[StoredBlock]]:
        """Return whether another process, which writes the store, began anew, and the blocks that it wrote since."""

    def give_back(self, place: int, num_bytes: int) -> None:
        """Free memory whose blocks were dropped, once all that was asked before is done."""
