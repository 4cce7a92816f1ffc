"""Bounds what the blocks of each cache salt take of a tier: over its limit a salt loses its own blocks."""

from __future__ import annotations

from collections import OrderedDict


class TenantBlocks:
    """The places of each salt's blocks in a tier, by `Link.tenant`, the least recently needed first.

    Args:
        limit_bytes: most bytes of a salt; None = no limit, and nothing is counted.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._sizes: dict[bytes, OrderedDict[int, int]] = {}  # bytes, by salt and place
        self._bytes: dict[bytes, int] = {}
        self._tenant: dict[int, bytes] = {}

    def add(self, place: int, num_bytes: int, tenant: bytes) -> None:
        """Count a block of a salt; blocks without one have no limit."""
        if tenant and self.limit_bytes is not None:
            self._tenant[place] = tenant
            self._sizes.setdefault(tenant, OrderedDict())[place] = num_bytes
            self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes

    def touch(self, place: int) -> None:
        """Note that a block is needed now."""
        if (tenant := self._tenant.get(place)) is not None:
            self._sizes[tenant].move_to_end(place)

    def remove(self, place: int) -> None:
        """Forget a block."""
        if (tenant := self._tenant.pop(place, None)) is not None:
            self._bytes[tenant] -= self._sizes[tenant].pop(place)
            if not self._sizes[tenant]:
                del self._sizes[tenant], self._bytes[tenant]

    def too_much(self, tenant: bytes, num_bytes: int) -> int | None:
        """Return the place of the block that a salt loses first if so many bytes more are above its limit; else
        None."""
        if self.limit_bytes is None or self._bytes.get(tenant, 0) + num_bytes <= self.limit_bytes:
            return None
        return next(iter(self._sizes.get(tenant, ())), None)

    def num_bytes(self) -> dict[bytes, int]:
        """Return the bytes of each salt that has some."""
        return dict(self._bytes)
