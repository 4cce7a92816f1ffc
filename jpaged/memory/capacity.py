"""Decides whether a request fits the pool: now, later or never (PagedAttention, section 4.5), in large pages.

Blocks that several sequences share count once. A prefix that the cache holds is attached before its request is
checked, and a pinned prefix left the pool when it was pinned. Blocks that running prompts have yet to take count as
taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables, Sequences, request_groups
from jpaged.memory.layout import PoolLayout
from jpaged.memory.pinned_blocks import PinnedBlocks
from jpaged.memory.policies import Policy
from jpaged.memory.step_blocks import StepBlocks


class Fit(Enum):
    """Verdict on a request that waits."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Lifetime(NamedTuple):
    """The most that a request may ever take. It is checked once, when the request is queued.

    Attributes:
        num_tokens: length that each of its sequences may grow to.
        num_seqs: number of its sequences. Each but the first has separate blocks after the shared full ones: at least
            a copied tail block a group.
        prompt_tokens: length of the prompt, which all its sequences share; None = unknown, and they share everything.
        encoder_tokens: number of encoder tokens of the request, see `MemoryManager.add`.
        held_blocks: most blocks of each group that it holds at once in addition to its sequences'; None = none.
        kept_tokens: leading tokens of the prompt that are to be found as a prefix, see `MemoryManager.add`.
    """

    num_tokens: int
    num_seqs: int = 1
    prompt_tokens: int | None = None
    encoder_tokens: int = 0
    held_blocks: Sequence[int] | None = None
    kept_tokens: int = 0


class Need(NamedTuple):
    """The blocks that a request takes if it is admitted now. A new one is made for each attempt: a preempted request
    has more tokens, and other requests may hold what it shares with them by then.

    Attributes:
        num_tokens: today's length of the longest sequence.
        num_seqs, prompt_tokens, encoder_tokens: see `Lifetime`.
        held_blocks: the same, without blocks that other requests hold.
        cached_tokens: tokens that `match_prefix` attached or, without a `seq_id`, would attach at best.
        seq_id: the request's first sequence, once its prefix was matched; None = it was not.
        leaves_nothing: whether to leave out what it could leave for later requests; not read with a `seq_id`.
    """

    num_tokens: int
    num_seqs: int = 1
    prompt_tokens: int | None = None
    encoder_tokens: int = 0
    held_blocks: Sequence[int] | None = None
    cached_tokens: int = 0
    seq_id: int | None = None
    leaves_nothing: bool = False


class _Size(NamedTuple):
    """The size of a request, with the policies that hold for it.

    Attributes:
        num_tokens: length of each of its sequences.
        num_seqs: number of its sequences.
        shared_tokens: leading tokens that all of them share.
        groups: policy and block size (tokens) of each layer group, for this request.
        held_blocks: see `Lifetime`.
    """

    num_tokens: int
    num_seqs: int
    shared_tokens: int
    groups: Sequence[tuple[Policy, int]]
    held_blocks: Sequence[int] | None = None


class ReclaimEstimate:
    """Estimates the blocks that preempting some requests would free, without freeing them.

    A block counts once all its owners are among them, a large page once all its used blocks are.

    Attributes:
        pages: large pages that would become available.
        spare: blocks of each group that could be had from pages that stay mixed; negative where pages leave.
    """

    def __init__(self, allocator: BlockAllocator, sequences: Sequences) -> None:
        self.pages = 0
        self.spare = [0] * len(allocator.groups)
        self._allocator = allocator
        self._sequences = sequences
        self._owners: list[Counter[int]] = [Counter() for _ in allocator.groups]
        self._freed: Counter[int] = Counter()

    def add_sequence(self, seq_id: int) -> None:
        """Count one more sequence, which was not counted before. O(its blocks)."""
        for g, table in enumerate(self._sequences[seq_id].tables):
            self.add(g, [block for block in table if block != NO_BLOCK])

    def add(self, g: int, blocks: Iterable[int]) -> None:
        """Count one more owner of some blocks of a group. O(the blocks)."""
        pages, group, owners = self._allocator.pages, self._allocator.groups[g], self._owners[g]
        for block in blocks:
            owners[block] += 1
            if owners[block] < group.ref_count[block]:
                continue
            page = block // group.blocks_per_page
            self._freed[page] += 1
            if self._freed[page] < pages.num_used[page]:
                self.spare[g] += 1
            else:
                self.pages += 1
                self.spare[g] -= group.blocks_per_page - 1


class CapacityCheck:
    """Compares the size of requests with the pool. It keeps a watermark of large pages free at admission, so that
    running sequences can still grow.

    Args:
        layout: how the pool is cut.
        groups: policy and block size (tokens) of each layer group.
        allocator: the state of the pool's blocks.
        sequences: all with blocks in the pool.
        pinned: those of them that stay for good.
        step: the blocks that the step in planning reads.
        watermark: share of the large pages kept free.
        max_step_tokens: most tokens a sequence computes in one step; None = a whole prompt.

    Attributes:
        watermark_pages: number of large pages kept free.

    Raises:
        ValueError: when the watermark is outside [0, 1).
    """

    def __init__(
        self,
        layout: PoolLayout,
        groups: Sequence[tuple[Policy, int]],
        allocator: BlockAllocator,
        sequences: Sequences,
        pinned: PinnedBlocks,
        step: StepBlocks,
        *,
        watermark: float,
        max_step_tokens: int | None,
    ) -> None:
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark={watermark} must be in [0, 1)")
        self._layout = layout
        self._groups = groups
        self._allocator = allocator
        self._sequences = sequences
        self._pinned = pinned
        self._step = step
        self.watermark_pages = int(watermark * layout.num_pages)
        self._max_step_tokens = max_step_tokens

    # A request that is queued.

    def is_possible(self, lifetime: Lifetime, *, pinned_tokens: int = 0, pinned_pages: int | None = None) -> bool:
        """Tell whether the request fits a pool that holds nothing but pinned blocks, above the watermark.

        Args:
            pinned_tokens: leading tokens that need no blocks, because they lie in pinned ones.
            pinned_pages: large pages that stay pinned; None = all that are.
        """
        needs = self._missing(self._size(lifetime, pinned_tokens), pinned_tokens)
        return self._fits_empty(needs, self._pinned.num_pages if pinned_pages is None else pinned_pages)

    def pages_alone(self, lifetime: Lifetime) -> int:
        """Return the large pages of an empty pool that the request takes at its full length."""
        return self._pages(self._missing(self._size(lifetime), 0))

    @property
    def num_lasting_pages(self) -> int:
        """Return how many large pages there are for one request in a pool with nothing but pinned blocks, above the
        watermark."""
        return self._layout.num_pages - self.watermark_pages - self._pinned.num_pages

    def is_tight(self, lifetime: Lifetime) -> bool:
        """Tell whether the request could fail to fit the same pool where its blocks are not packed.

        Blocks that are freed one by one can leave large pages that a single block holds.
        """
        pages, size = 0, self._size(lifetime)
        for g, (group, (policy, block_size)) in enumerate(zip(self._layout.groups, size.groups, strict=True)):
            peak, total, own = self._peak(policy, block_size, size)
            pages += 0 if size.held_blocks is None else -(-size.held_blocks[g] // group.blocks_per_page)
            grows = peak == total and size.num_seqs == 1
            pages += -(-peak // group.blocks_per_page) if grows else peak + own
        return pages > self._layout.num_pages - self._pinned.num_pages

    # An attempt to admit it.

    def verdict(
        self, need: Need, *, reserved: Sequence[int] | None, may_wait: bool | None, reclaimed: ReclaimEstimate | None
    ) -> Fit:
        """Tell whether a request fits now, later or never; see `MemoryManager.can_admit`."""
        needs = self._missing(self._size(need), need.cached_tokens)
        if not self._fits_empty(needs, self._pinned.num_pages):
            return Fit.NEVER
        if reserved is not None:
            needs = [mine + others for mine, others in zip(needs, reserved, strict=True)]
        if may_wait is None:
            may_wait = len(self._sequences) > len(self._pinned.seq_ids)
        return Fit.OK if self.has_room(needs, may_wait=may_wait, reclaimed=reclaimed) else Fit.LATER

    def has_room(
        self,
        needs: Sequence[int],
        *,
        may_wait: bool,
        keep_room: bool = True,
        reclaimed: ReclaimEstimate | None = None,
    ) -> bool:
        """Tell whether so many blocks of each group can be had now.

        Args:
            may_wait: whether other sequences run, so that the request can wait rather than take protected blocks.
            keep_room: whether the watermark has to stay free.
            reclaimed: blocks that would be freed first; None = none.
        """
        allocator, watermark = self._allocator, self.watermark_pages if keep_room else 0
        pages, spare = (reclaimed.pages, reclaimed.spare) if reclaimed else (0, None)
        if may_wait:
            return allocator.new_pages_needed(needs, spare) <= allocator.num_unguarded + pages - watermark
        return allocator.pages_needed(needs, spare) <= allocator.pages.num_available + pages - watermark

    # Requests that run.

    def outstanding(self, sequence: BlockTables, num_tokens: int, *, is_swapped: bool = False) -> list[int]:
        """Return how many blocks of each group a sequence has yet to take to compute `num_tokens` tokens."""
        request, counts = sequence.request, []
        whole = _Size(num_tokens, 1, num_tokens, request.groups)
        for g, (policy, size) in enumerate(request.groups):
            peak, total, _ = self._peak(policy, size, whole)
            table = sequence.tables[g]
            more = max(0, total - _count(policy, len(table), size))
            if more and peak < total:
                runs = policy.active_blocks(sequence.num_computed, size)
                held = [table[i] for run in runs for i in run if i < len(table) and table[i] != NO_BLOCK]
                own = len(held) if is_swapped else sum(self._step.owners(g, block) == 1 for block in held)
                more = min(more, max(0, peak - own))
            counts.append(more)
        return counts

    def outstanding_fork(self, parent: BlockTables, num_tokens: int, shared_tokens: int) -> list[int]:
        """Return how many blocks of each group a sequence of `num_tokens` takes that is to be forked from its parent's
        first `shared_tokens`."""
        size = _Size(num_tokens, 2, shared_tokens, parent.request.groups)
        return [self._peak(policy, block_size, size)[2] for policy, block_size in size.groups]

    # Blocks that a request takes.

    def _size(self, demand: Lifetime | Need, cached: int = 0) -> _Size:
        groups: list[tuple[Policy, int]] = request_groups(self._groups, demand.encoder_tokens, demand.prompt_tokens)
        if isinstance(demand, Need):
            if demand.seq_id is not None:
                groups = self._sequences[demand.seq_id].request.groups  # its prefix is decided, and so are these
            elif demand.leaves_nothing:
                groups = _least(groups, 0, 0)
        else:  # one that runs alone is made to leave nothing else for later requests, see `MemoryManager.leave_less`
            groups = _least(groups, cached, demand.kept_tokens)
        length, prompt = demand.num_tokens, demand.prompt_tokens
        shared = length if prompt is None else min(prompt, length)
        return _Size(length, demand.num_seqs, shared, groups, demand.held_blocks)

    def _fits_empty(self, needs: Sequence[int], pinned_pages: int) -> bool:
        """Tell whether so many blocks of each group fit a pool that holds nothing but so many pages."""
        return self._pages(needs) <= self._layout.num_pages - self.watermark_pages - pinned_pages

    def _pages(self, needs: Sequence[int]) -> int:
        """Return how many large pages so many blocks of each group fill."""
        return sum(
            -(-blocks // group.blocks_per_page) for group, blocks in zip(self._layout.groups, needs, strict=True)
        )

    def _missing(self, size: _Size, cached_tokens: int) -> list[int]:
        """Return how many blocks of each group a request takes when its first `cached_tokens` tokens have theirs."""
        missing = []
        for policy, block_size in size.groups:
            peak, total, own = self._peak(policy, block_size, size)
            cached = _count(policy, policy.full_blocks(cached_tokens, cached_tokens, block_size), block_size)
            missing.append(min(peak, total - cached) + own)
        if size.held_blocks is not None:
            missing = [mine + held for mine, held in zip(missing, size.held_blocks, strict=True)]
        return missing

    def _peak(self, policy: Policy, block_size: int, size: _Size) -> tuple[int, int, int]:
        """Return (most blocks of one sequence at once, blocks it takes in all, blocks of the other sequences)."""
        step = min(self._max_step_tokens or size.num_tokens, size.num_tokens)
        peak = policy.peak_blocks(size.num_tokens, step, block_size)
        num_blocks = _count(policy, policy.num_blocks(size.num_tokens, block_size), block_size)
        total = max(peak, num_blocks + (policy.optional_blocks if num_blocks else 0))
        shared = size.shared_tokens
        diverging = policy.written_blocks(shared, max(size.num_tokens, shared + 1), block_size)
        return peak, total, (size.num_seqs - 1) * min(peak, len(policy.placed(diverging, block_size)))


def _least(groups: Sequence[tuple[Policy, int]], cached: int, kept: int) -> list[tuple[Policy, int]]:
    """Return the policies with which a request that begins with `cached` tokens takes the least: no state stays but the
    one that it needs, and the one after `kept` tokens."""
    return [
        (policy.for_prefix(cached, kept).for_little_room(cached, kept, at_end=False), size) for policy, size in groups
    ]


def _count(policy: Policy, entries: int, block_size: int) -> int:
    """Return how many of a table's leading entries have a block."""
    return len(policy.placed(range(entries), block_size))
