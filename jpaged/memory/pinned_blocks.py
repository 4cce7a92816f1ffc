"""Pinned sequences: other sequences may share their blocks, but never take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence

from jpaged.memory.block_tables import NO_BLOCK, Sequences
from jpaged.memory.hash_chain import TokenSpan
from jpaged.memory.layout import PoolLayout
from jpaged.memory.prefix_cache import PrefixCache


class PinnedBlocks:
    """The pinned sequences, their blocks and the large pages that these take.

    Args:
        sequences: all with blocks in the pool, the pinned ones among them.

    Attributes:
        num_pages: large pages that hold pinned blocks, which no other group can get.
    """

    def __init__(self, layout: PoolLayout, cache: PrefixCache, sequences: Sequences) -> None:
        self.num_pages = 0
        self._cache = cache
        self._sequences = sequences
        self._blocks_per_page = [group.blocks_per_page for group in layout.groups]
        self._held: dict[int, list[list[int]]] = {}  # the blocks of each group, by sequence
        self._owners: list[Counter[int]] = [Counter() for _ in layout.groups]  # by block; those without are left out
        self._filled: list[Counter[int]] = [Counter() for _ in layout.groups]  # pinned blocks by page, likewise

    @property
    def seq_ids(self) -> Collection[int]:
        """Return the ids of the pinned sequences."""
        return self._held.keys()

    def add(self, seq_id: int) -> None:
        """Pin a sequence: it keeps its present blocks until it is freed. O(its blocks)."""
        tables = self._sequences[seq_id].tables
        self._held[seq_id] = [[block for block in table if block != NO_BLOCK] for table in tables]
        for g, blocks in enumerate(self._held[seq_id]):
            owners, filled, size = self._owners[g], self._filled[g], self._blocks_per_page[g]
            for block in blocks:
                owners[block] += 1
                if owners[block] == 1:
                    filled[block // size] += 1
        self._count()

    def remove(self, seq_id: int) -> None:
        """Forget a pinned sequence that was freed. O(its blocks)."""
        for g, blocks in enumerate(self._held.pop(seq_id)):
            owners, filled, size = self._owners[g], self._filled[g], self._blocks_per_page[g]
            for block in blocks:
                owners[block] -= 1
                if not owners[block]:
                    del owners[block]
                    filled[block // size] -= 1
                    if not filled[block // size]:
                        del filled[block // size]
        self._count()

    def pages_of(self, seq_ids: Collection[int]) -> int:
        """Return how many large pages hold blocks of these pinned sequences. O(their blocks)."""
        blocks = ((g, block) for seq_id in seq_ids for g, held in enumerate(self._held[seq_id]) for block in held)
        return len({(g, block // self._blocks_per_page[g]) for g, block in blocks})

    def prefix(
        self, token_ids: Sequence[int], salt: Hashable, encoder_tokens: int, spans: Sequence[TokenSpan] = ()
    ) -> int:
        """Return how many leading tokens, at most all but the last, lie in pinned blocks of every group."""
        if not self._held:
            return 0
        return self._cache.covered(token_ids, salt, len(token_ids) - 1, self._owners, encoder_tokens, spans)

    def _count(self) -> None:
        self.num_pages = sum(map(len, self._filled))
