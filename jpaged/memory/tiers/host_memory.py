"""Shares one bound on host memory among adapters, swapped blocks and cached blocks."""

from __future__ import annotations

import math


class HostMemory:
    """The bytes that an engine's adapters and swapped blocks take of one bound; cached blocks have the rest.

    Adapters may be counted by any thread, swapped blocks by the thread of the engine alone. So either may grow before
    the other has seen it; the next step and the next adapter read the bound again.

    Args:
        limit: the bound, of all devices together; infinite = there is none.

    Attributes:
        adapters: bytes of the adapters.
        swapped: bytes of the swapped blocks.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.adapters = 0
        self.swapped = 0

    @property
    def for_adapters(self) -> float:
        """Return the most bytes of adapters, those that requests use included: half of the bound, so that many unused
        ones never leave cached blocks without any, and no more than swapped blocks leave."""
        return min(self.limit / 2, self.limit - self.swapped)

    @property
    def for_swapped(self) -> float:
        """Return the most bytes of swapped blocks: what adapters leave, as cached blocks give way to both."""
        return self.limit - self.adapters

    @property
    def taken(self) -> int:
        """Return the bytes that cached blocks cannot have."""
        return self.adapters + self.swapped
