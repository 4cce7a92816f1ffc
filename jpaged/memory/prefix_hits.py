"""Gives a new sequence the blocks that hold its prompt's beginning already, in the pool or on disk."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import BlockTables
from jpaged.memory.disk import DiskTier, attach_with_disk
from jpaged.memory.ownership import Ownership
from jpaged.memory.predicted_prefixes import PredictedPrefixes
from jpaged.memory.prefix_cache import PrefixCache, longest_prefix, prefix_tables
from jpaged.memory.recent_prefixes import RecentPrefixes
from jpaged.memory.spans import TokenSpan


class PrefixHits:
    """Finds and attaches the longest prefix of a prompt that is cached, see `MemoryManager.match_prefix`.

    Args:
        allocator, cache, ownership: the blocks, what they hold and who has them.
        recent: is told of each prompt that begins; None = nobody asks.
        predicted: chooses what to protect of it; None = nothing is protected.
        disk: has what the pool lost; None = there is none.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        cache: PrefixCache,
        ownership: Ownership,
        *,
        recent: RecentPrefixes | None,
        predicted: PredictedPrefixes | None,
        disk: DiskTier | None,
    ) -> None:
        self._allocator = allocator
        self._cache = cache
        self._ownership = ownership
        self._recent = recent
        self._predicted = predicted
        self._disk = disk

    def attach(
        self,
        sequence: BlockTables,
        token_ids: Sequence[int],
        limit: int,
        *,
        salt: Hashable,
        spans: Sequence[TokenSpan],
        from_disk: bool,
    ) -> int:
        """Attach at most `limit` tokens to a sequence without blocks, which keeps to `token_ids`; return how many."""
        sequence.chains = self._cache.chains(salt, spans)
        length = self._attach_from_disk(sequence, token_ids, limit, spans) if from_disk else 0
        if length:
            return length
        length, found = self._cache.match(sequence, token_ids, limit, spans)
        self._begin(sequence, length)
        if length:
            self._ownership.attach(sequence, prefix_tables(sequence.request.groups, found, length), length)
        return length

    def _attach_from_disk(
        self, sequence: BlockTables, token_ids: Sequence[int], limit: int, spans: Sequence[TokenSpan]
    ) -> int:
        """Attach a prefix of which a part was read from disk; return its tokens, 0 where the pool has as much of it or
        is short of blocks."""
        staged = {} if self._disk is None else self._disk.staged(sequence.request.request_id)
        if self._disk is None or not staged:
            return 0
        length, found = self._cache.match(sequence, token_ids, limit, spans, staged)
        here = [[block is not None for block in blocks] for blocks in found]
        cached = longest_prefix(sequence.request.groups, here, limit, spans)
        if length <= cached:
            return 0
        self._begin(sequence, length)
        fills = attach_with_disk(self._allocator, self._cache, self._ownership, sequence, found, length, staged)
        if fills is None:
            return 0
        self._disk.fill(fills, length - cached)
        return length

    def _begin(self, sequence: BlockTables, length: int) -> None:
        """Decide what depends on the prefix that a sequence begins with, of `length` tokens."""
        shared = 0 if self._recent is None else self._recent.arrived(sequence)
        sequence.request.begin(length, shared)
        if self._predicted is not None:
            self._predicted.lost.asked(sequence.request.request_id, length)
            self._predicted.predict(sequence, shared)
