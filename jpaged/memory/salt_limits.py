"""Bounds the cached bytes of each cache salt: over its limit a salt loses its own blocks, not those of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.prefix_cache import PrefixCache


@dataclass(eq=False)
class _Salt:
    """The evictable blocks of one salt; `order` has stale entries too, of blocks that left."""

    num_bytes: int = 0
    blocks: dict[tuple[int, int], EvictionKey] = field(default_factory=dict)
    order: list[tuple[EvictionKey, int, int]] = field(default_factory=list)


class SaltLimits:
    """Watches the cached blocks without an owner of each salt, by `Link.tenant`.

    Blocks in use do not count: they are the requests', and count once the last of these ends.

    Args:
        limit_bytes: most bytes of a salt, as bytes of one device.
        block_bytes: bytes of a block of each group.
        cache: knows the content of blocks.
        discard: evicts one block.

    Raises:
        ValueError: the limit is smaller than a block.
    """

    def __init__(
        self, limit_bytes: int, block_bytes: Sequence[int], cache: PrefixCache, discard: Callable[[int, int], None]
    ) -> None:
        if limit_bytes < max(block_bytes):
            raise ValueError(
                f"cache_salt_bytes={limit_bytes:,} is below the {max(block_bytes):,} bytes of one block: raise it, or "
                "set enable_prefix_caching=False"
            )
        self.limit_bytes = limit_bytes
        self._block_bytes = block_bytes
        self._cache = cache
        self._discard = discard
        self._salts: dict[bytes, _Salt] = {}
        self._salt_of: dict[tuple[int, int], bytes] = {}

    def kept(self, g: int, block: int, key: EvictionKey) -> None:
        """Note that a cached block has no owner any more, or another place in the order; evict what is too much."""
        link = self._cache.link(g, block)
        if link is None or not link.tenant:
            return
        self.left(g, block)
        salt = self._salts.setdefault(link.tenant, _Salt())
        self._salt_of[g, block] = link.tenant
        salt.blocks[g, block] = key
        salt.num_bytes += self._block_bytes[g]
        heappush(salt.order, (key, g, block))
        if len(salt.order) > 2 * len(salt.blocks) + 64:
            salt.order = [(time, *where) for where, time in salt.blocks.items()]
            heapify(salt.order)
        while salt.num_bytes > self.limit_bytes:
            time, *oldest = heappop(salt.order)
            if salt.blocks.get((oldest[0], oldest[1])) == time:
                self._discard(oldest[0], oldest[1])

    def left(self, g: int, block: int) -> None:
        """Note that a block is used again or was evicted."""
        name = self._salt_of.pop((g, block), None)
        if name is not None:
            salt = self._salts[name]
            del salt.blocks[g, block]
            salt.num_bytes -= self._block_bytes[g]
            if not salt.blocks:
                del self._salts[name]

    def num_bytes(self) -> dict[bytes, int]:
        """Return the cached bytes of each salt that has some."""
        return {name: salt.num_bytes for name, salt in self._salts.items()}
