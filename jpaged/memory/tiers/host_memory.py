"""Shares one bound on host memory among adapters, swapped blocks and cached blocks."""

from __future__ import annotations

import math
from collections.abc import Callable


class HostMemory:
    """The bytes that an engine's adapters and swapped blocks take of one bound; cached blocks have the rest.

    Adapters may be counted by any thread, swapped blocks by the thread of the engine alone. So either may grow before
    the other has seen it; the next step and the next adapter read the bound again.

    Args:
        limit: the bound, of all devices together; infinite = there is none.

    Attributes:
        adapters: bytes of the adapters.
        used_adapters: those of adapters that unfinished requests use, which cannot be dropped.
        swapped: bytes of the swapped blocks.
        drop_unused: drops adapters that no request uses while there are more than `for_adapters`; it never waits.
    """

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit
        self.adapters = 0
        self.used_adapters = 0
        self.swapped = 0
        self.drop_unused: Callable[[], None] = lambda: None

    @property
    def for_adapters(self) -> float:
        """Return the most bytes of adapters, those that requests use included: half of the bound, so that many unused
        ones never leave cached blocks without any, and no more than swapped blocks leave."""
        return min(self.limit / 2, self.limit - self.swapped)

    @property
    def for_swapped(self) -> float:
        """Return the most bytes of swapped blocks: what adapters in use leave, as all others and cached blocks give way
        to them."""
        return self.limit - self.used_adapters

    def leave_swapped(self, num_bytes: int) -> None:
        """Leave so many bytes to swapped blocks."""
        self.swapped = num_bytes
        if self.adapters > self.for_adapters:
            self.drop_unused()

    @property
    def taken(self) -> int:
        """Return the bytes that cached blocks cannot have."""
        return self.adapters + self.swapped
