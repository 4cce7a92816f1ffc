"""What blocks keep when nobody holds them any more, prefixes, images and adapters, and how it is lost."""

from __future__ import annotations

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.disk import DiskTier
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.prefix_prediction import PredictedPrefixes
from jpaged.memory.shared_blocks import ImageBlocks


class EvictionListener:
    """Follows what an allocator takes of cached blocks: its `lost` and `after_taking` are what the allocator calls.

    Args:
        cache: what full blocks of sequences hold.
        disk: where that goes when it is lost; None = nowhere.

    Attributes:
        shared: images and adapters, by their groups; they are lost as shared.
        predicted: is told what prefixes were lost; None = nothing is predicted.
    """

    def __init__(self, cache: PrefixCache, disk: DiskTier | None) -> None:
        self._cache = cache
        self._disk = disk
        self.shared: dict[int, ImageBlocks] = {}
        self.predicted: PredictedPrefixes | None = None

    def evicted(self, g: int, block: int) -> None:
        """Note that a cached block lost its content."""
        if g in self.shared:
            self.shared[g].evicted(block)
            return
        link = self._cache.link(g, block)
        if link is not None and self.predicted is not None:
            self.predicted.lost.evicted(g, link.digest)
        if link is not None and self._disk is not None:
            self._disk.evicted(g, block, link)
        self._cache.forget(g, block)

    def discard_torn(self) -> None:
        """Give up what is left of images and adapters that were evicted in part."""
        for blocks in self.shared.values():
            blocks.discard_torn()

    def forget(self, allocator: BlockAllocator) -> None:
        """Forget all of it, on disk too."""
        allocator.drop_evictable()
        if self._disk is not None:
            self._disk.clear()
        if self.predicted is not None:
            self.predicted.lost.forget()
