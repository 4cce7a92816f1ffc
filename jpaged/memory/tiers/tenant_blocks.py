"""Bounds what the blocks of each cache salt take of a tier: over its limit a salt loses its own blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged.memory.tiers.index import StoredBlock


class TenantBlocks:
    """The blocks of each salt in a tier, by `Link.tenant`, the least recently needed first.

    Args:
        limit_bytes: most bytes of a salt; None = no limit, and nothing is counted.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._blocks: dict[bytes, OrderedDict[int, StoredBlock]] = {}  # by salt and place
        self._bytes: dict[bytes, int] = {}
        self._tenant: dict[int, bytes] = {}

    def add(self, stored: StoredBlock, tenant: bytes) -> None:
        """Count a block of a salt; blocks without one have no limit."""
        if tenant and self.limit_bytes is not None:
            self._tenant[stored.place] = tenant
            self._blocks.setdefault(tenant, OrderedDict())[stored.place] = stored
            self._bytes[tenant] = self._bytes.get(tenant, 0) + stored.num_bytes

    def touch(self, stored: StoredBlock) -> None:
        """Note that a block is needed now."""
        if (tenant := self._tenant.get(stored.place)) is not None:
            self._blocks[tenant].move_to_end(stored.place)

    def remove(self, stored: StoredBlock) -> None:
        """Forget a block."""
        if (tenant := self._tenant.pop(stored.place, None)) is not None:
            del self._blocks[tenant][stored.place]
            self._bytes[tenant] -= stored.num_bytes
            if not self._blocks[tenant]:
                del self._blocks[tenant], self._bytes[tenant]

    def too_much(self, tenant: bytes, num_bytes: int) -> StoredBlock | None:
        """Return the block that a salt loses first if so many bytes more are above its limit; else None."""
        if self.limit_bytes is None or self._bytes.get(tenant, 0) + num_bytes <= self.limit_bytes:
            return None
        return next(iter(self._blocks.get(tenant, {}).values()), None)

    def num_bytes(self) -> dict[bytes, int]:
        """Return the bytes of each salt that has some."""
        return dict(self._bytes)
