"""Whether a new request fits: now, later, or never (PagedAttention, section 4.5), in large pages over all groups.

Blocks that it shares count once: what it found in the prefix cache is attached before it is asked for, and what is
pinned was taken from the pool when it was pinned. What running prompts have yet to take counts as taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables
from jpaged.memory.layout import PoolLayout
from jpaged.memory.policies import Policy
from jpaged.memory.relief import Relief


class Fit(Enum):
    """Verdict on a request that waits."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Demand(NamedTuple):
    """The size of a request whose blocks are to be counted.

    Attributes:
        num_tokens: length of each of its sequences.
        num_seqs: number of its sequences.
        shared_tokens: leading tokens that all of them share.
        groups: policy and block size (tokens) of each layer group, for this request.
        beside: blocks of each group that it takes beside those of its sequences, as its adapter's; None = none.
    """

    num_tokens: int
    num_seqs: int
    shared_tokens: int
    groups: Sequence[tuple[Policy, int]]
    beside: Sequence[int] | None = None


class Admission:
    """Keeps a watermark of large pages free, so that running sequences can still grow.

    Args:
        layout: how the pool is cut.
        allocator: the state of the pool's blocks.
        watermark: share of the large pages kept free.
        max_step_tokens: most tokens a sequence computes in one step; None = a whole prompt.

    Attributes:
        watermark_pages: number of large pages kept free.

    Raises:
        ValueError: when the watermark is outside [0, 1).
    """

    def __init__(
        self, layout: PoolLayout, allocator: BlockAllocator, watermark: float, max_step_tokens: int | None
    ) -> None:
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark={watermark} must be in [0, 1)")
        self._layout = layout
        self._allocator = allocator
        self.watermark_pages = int(watermark * layout.num_pages)
        self._max_step_tokens = max_step_tokens

    def is_possible(self, demand: Demand, *, pinned_tokens: int, pinned_pages: int) -> bool:
        """Tell whether the demand fits a pool that has nothing but pinned blocks, above the watermark.

        Args:
            pinned_tokens: leading tokens that need no blocks, because they lie in pinned ones.
            pinned_pages: number of large pages that pinned blocks take.
        """
        pages = sum(
            -(-blocks // group.blocks_per_page)
            for group, blocks in zip(self._layout.groups, self.missing(demand, pinned_tokens), strict=True)
        )
        return pages <= self._layout.num_pages - self.watermark_pages - pinned_pages

    def is_tight(self, demand: Demand, *, pinned_pages: int) -> bool:
        """Tell whether the demand could fail to fit the same pool where its blocks are not packed.

        Blocks that are given up one by one leave large pages that a single block holds.
        """
        pages = 0
        for g, (group, (policy, size)) in enumerate(zip(self._layout.groups, demand.groups, strict=True)):
            peak, total, own = self._peak(policy, size, demand)
            pages += 0 if demand.beside is None else -(-demand.beside[g] // group.blocks_per_page)
            grows = peak == total and demand.num_seqs == 1
            pages += -(-peak // group.blocks_per_page) if grows else peak + own
        return pages > self._layout.num_pages - pinned_pages

    def missing(self, demand: Demand, cached_tokens: int) -> list[int]:
        """Return how many blocks of each group the demand takes when the first `cached_tokens` tokens have theirs."""
        missing = []
        for policy, size in demand.groups:
            peak, total, own = self._peak(policy, size, demand)
            cached = _count(policy, policy.full_blocks(cached_tokens, cached_tokens, size), size)
            missing.append(min(peak, total - cached) + own)
        if demand.beside is not None:
            missing = [own + beside for own, beside in zip(missing, demand.beside, strict=True)]
        return missing

    def outstanding(self, sequence: BlockTables, num_tokens: int, *, is_swapped: bool = False) -> list[int]:
        """Return how many blocks of each group a sequence has yet to take to compute `num_tokens` tokens."""
        request, counts = sequence.request, []
        demand = Demand(num_tokens, 1, num_tokens, request.groups)
        for g, (policy, size) in enumerate(request.groups):
            peak, total, _ = self._peak(policy, size, demand)
            table = sequence.tables[g]
            more = max(0, total - _count(policy, len(table), size))
            if more and peak < total:
                runs, ref_count = policy.active_blocks(sequence.num_computed, size), self._allocator.groups[g].ref_count
                held = [table[i] for run in runs for i in run if i < len(table) and table[i] != NO_BLOCK]
                own = len(held) if is_swapped else sum(ref_count[block] == 1 for block in held)
                more = min(more, max(0, peak - own))
            counts.append(more)
        return counts

    def forked(self, sequence: BlockTables, num_tokens: int, shared_tokens: int) -> list[int]:
        """Return how many blocks of each group a sequence of `num_tokens` takes that is to be forked from another's
        first `shared_tokens`."""
        demand = Demand(num_tokens, 2, shared_tokens, sequence.request.groups)
        return [self._peak(policy, size, demand)[2] for policy, size in sequence.request.groups]

    def has_room(
        self, needs: Sequence[int], *, may_wait: bool, keep_room: bool = True, relief: Relief | None = None
    ) -> bool:
        """Tell whether so many blocks of each group can be had now.

        Args:
            may_wait: whether somebody runs, so that the request can wait rather than take protected blocks.
            keep_room: whether the watermark has to stay free.
            relief: blocks that would be freed first; None = none.
        """
        allocator, watermark = self._allocator, self.watermark_pages if keep_room else 0
        pages, spare = (relief.pages, relief.spare) if relief else (0, None)
        if may_wait:
            return allocator.new_pages_needed(needs, spare) <= allocator.num_unguarded + pages - watermark
        return allocator.pages_needed(needs, spare) <= allocator.pages.num_available + pages - watermark

    def _peak(self, policy: Policy, size: int, demand: Demand) -> tuple[int, int, int]:
        """Return (most blocks of one sequence at once, blocks it takes in all, what the others take beside them)."""
        step = min(self._max_step_tokens or demand.num_tokens, demand.num_tokens)
        peak = policy.peak_blocks(demand.num_tokens, step, size)
        num_blocks = _count(policy, policy.num_blocks(demand.num_tokens, size), size)
        total = max(peak, num_blocks + (policy.optional_blocks if num_blocks else 0))
        shared = demand.shared_tokens
        diverging = policy.written_blocks(shared, max(demand.num_tokens, shared + 1), size)
        return peak, total, (demand.num_seqs - 1) * min(peak, len(policy.placed(diverging, size)))


def _count(policy: Policy, entries: int, block_size: int) -> int:
    """Return how many of a table's leading entries have a block."""
    return len(policy.placed(range(entries), block_size))
