"""A low-rank adapter as it lies on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt8


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank adapter, as it lies on the host.

    Attributes:
        name: what requests call it.
        digest: names its content: equal for equal matrices and scales only.
        blocks: what its blocks in the pool hold, on each shard.
        site_blocks: how many of them, in order, each of the model's adapted sites has; 0 where it adapts none.
    """

    name: str
    digest: bytes
    blocks: UInt8[np.ndarray, "shards blocks bytes"] = field(repr=False)
    site_blocks: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Return how many blocks of the pool it takes."""
        return self.blocks.shape[1]

    @property
    def salt(self) -> tuple[str, str]:
        """Return what keeps the KV that is computed with it apart in the prefix cache."""
        return self.name, self.digest.hex()
