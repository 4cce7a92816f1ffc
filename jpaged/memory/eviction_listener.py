"""Handles evictions: updates the prefix cache, what requests hold, and the tiers."""

from __future__ import annotations

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.checkpoint_share import CheckpointShare
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.prefix_prediction import PredictedPrefixes
from jpaged.memory.retention import Retention
from jpaged.memory.shared_blocks import SharedBlocks
from jpaged.memory.step_blocks import StepBlocks
from jpaged.memory.tiers import Tiers


class EvictionListener:
    """The allocator's callbacks: it calls `evicted` for each cached block that it takes, and `discard_torn` after all.

    Args:
        cache: the contents of full blocks of sequences.
        tiers: get the content of evicted blocks; None = it is lost.

    Attributes:
        shared: contents that requests hold, by their groups. One that loses a block is lost as a whole.
        predicted: learns which prefixes were evicted; None = nothing is predicted.
        checkpoints: bounds cached states; None = there are none.
        step: knows the blocks whose content is not in the pool yet; None = there are none.
        retention: the priorities that requests gave to contents; None = there are none.
    """

    def __init__(self, cache: PrefixCache, tiers: Tiers | None) -> None:
        self._cache = cache
        self._tiers = tiers
        self.retention: Retention | None = None
        self.shared: dict[int, SharedBlocks] = {}
        self.predicted: PredictedPrefixes | None = None
        self.checkpoints: CheckpointShare | None = None
        self.step: StepBlocks | None = None

    def evicted(self, g: int, block: int) -> None:
        """Forget the content of a block that is being evicted, after the tiers could take it."""
        if g in self.shared:
            if self._tiers is not None and self.shared[g].policy.goes_to_tiers:
                for other, content in self.shared[g].torn_by(block):
                    self._tiers.evicted(g, other, content)
            self.shared[g].evicted(block)
            return
        if self.checkpoints is not None and g in self.checkpoints.groups:
            self.checkpoints.forget(g, block)
        link = self._cache.link(g, block)
        if link is not None and self.predicted is not None:
            self.predicted.lost.evicted(g, link.digest)
        if link is not None and self._tiers is not None:
            if self.step is not None and (g, block) in self.step.filled:
                self._tiers.unfill(g, block, link)
            else:
                self._tiers.evicted(g, block, link)
        if link is not None and self.retention is not None:
            self.retention.forget(g, link.digest)
        self._cache.forget(g, block)

    def discard_torn(self) -> None:
        """Discard the other blocks of contents of which some were evicted."""
        for blocks in self.shared.values():
            blocks.discard_torn()

    def forget(self, allocator: BlockAllocator) -> None:
        """Forget all cached content, in the tiers too."""
        allocator.drop_evictable()
        if self._tiers is not None:
            self._tiers.clear()
        if self.predicted is not None:
            self.predicted.lost.forget()
