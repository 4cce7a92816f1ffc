"""Pinned sequences: other sequences may share their blocks, but never take them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from jpaged.memory.block_tables import NO_BLOCK, Sequences
from jpaged.memory.hash_chain import TokenSpan
from jpaged.memory.layout import PoolLayout
from jpaged.memory.prefix_cache import PrefixCache


class PinnedBlocks:
    """The pinned sequences, their blocks and the large pages that these take.

    Args:
        sequences: all with blocks in the pool, the pinned ones among them.

    Attributes:
        seq_ids: the pinned ones.
        num_pages: large pages that hold pinned blocks, which no other group can get.
    """

    def __init__(self, layout: PoolLayout, cache: PrefixCache, sequences: Sequences) -> None:
        self.seq_ids: set[int] = set()
        self.num_pages = 0
        self._layout = layout
        self._cache = cache
        self._sequences = sequences
        self._blocks: list[set[int]] = [set() for _ in layout.groups]

    def add(self, seq_id: int) -> None:
        """Pin a sequence: it keeps its present blocks until it is freed."""
        self.seq_ids.add(seq_id)
        self._count()

    def remove(self, seq_id: int) -> None:
        """Forget a pinned sequence that was freed."""
        self.seq_ids.remove(seq_id)
        self._count()

    def prefix(
        self, token_ids: Sequence[int], salt: Hashable, encoder_tokens: int, spans: Sequence[TokenSpan] = ()
    ) -> int:
        """Return how many leading tokens, at most all but the last, lie in pinned blocks of every group."""
        if not self.seq_ids:
            return 0
        return self._cache.covered(token_ids, salt, len(token_ids) - 1, self._blocks, encoder_tokens, spans)

    def _count(self) -> None:
        tables = [self._sequences[seq_id].tables for seq_id in self.seq_ids]
        self._blocks = [
            {block for mine in tables for block in mine[g] if block != NO_BLOCK}
            for g in range(len(self._layout.groups))
        ]
        self.num_pages = sum(
            len({block // group.blocks_per_page for block in blocks})
            for group, blocks in zip(self._layout.groups, self._blocks, strict=True)
        )
