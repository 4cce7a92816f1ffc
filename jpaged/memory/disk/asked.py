"""What one waiting request has been read from disk so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jpaged.memory.disk.moves import DiskRead
from jpaged.memory.hash_chain import HashChain

if TYPE_CHECKING:
    import numpy as np


class Asked:
    """What is known of a request that waits.

    Args:
        chains: its empty hash chains, see `PrefixCache.chains`.

    Attributes:
        contents: bytes of blocks that were read for it, by group and digest.
        read: what is being read; None = nothing.
        deadline: time after which nobody waits for that any more.
        num_bytes: size of all that was or is being read.
        seen: state of the pool and the disk, as `DiskTier.version` counts it, when it was last looked at.
        has_given_up: whether a read took too long, so that none is begun again.
    """

    def __init__(self, chains: dict[int, HashChain]) -> None:
        self.chains = chains
        self.contents: dict[tuple[int, bytes], np.ndarray] = {}
        self.read: DiskRead | None = None
        self.deadline = 0.0
        self.num_bytes = 0
        self.seen = -1
        self.has_given_up = False

    def cancel(self) -> None:
        """Say that nobody waits for what is being read."""
        if self.read is not None:
            self.read.is_cancelled = True
            self.read = None
