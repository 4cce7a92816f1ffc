"""Whether a new request fits: now, later, or never (PagedAttention, section 4.5), in large pages over all groups."""

from __future__ import annotations

from enum import Enum

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.layout import PoolLayout


class Fit(Enum):
    """Verdict on a request that waits."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Admission:
    """Keeps a watermark of large pages free, so that running sequences can still grow.

    Args:
        layout: of the pool.
        allocator: its state.
        watermark: share of the large pages kept free.
        max_step_tokens: most tokens a sequence computes in one step; None: a whole prompt.

    Attributes:
        watermark_pages: what is kept free.
        pinned_pages: large pages that nobody will ever get.

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
        self.pinned_pages = 0
        self.watermark_pages = int(watermark * layout.num_pages)
        self._max_step_tokens = max_step_tokens

    def verdict(
        self,
        num_tokens: int,
        num_seqs: int,
        cached_tokens: int,
        shared_tokens: int,
        encoder_tokens: int,
        prompt_tokens: int | None,
        may_wait: bool,
    ) -> Fit:
        """See `MemoryManager.can_admit`.

        Args:
            may_wait: somebody runs, so that the request can wait rather than take protected blocks.
        """
        step = min(self._max_step_tokens or num_tokens, num_tokens)
        missing, pages = [], 0
        for group in self._layout.groups:
            policy, size = group.spec.policy.for_request(encoder_tokens, prompt_tokens), group.spec.block_size
            peak = policy.peak_blocks(num_tokens, step, size)
            total = max(peak, policy.num_blocks(num_tokens, size))
            diverging = policy.written_blocks(shared_tokens, max(num_tokens, shared_tokens + 1), size)
            own = (num_seqs - 1) * min(peak, len(diverging))
            blocks = peak + own
            uncached = total - policy.full_blocks(cached_tokens, cached_tokens, size) + own
            missing.append(min(blocks, uncached))
            pages += -(-blocks // group.blocks_per_page)
        if pages > self._layout.num_pages - self.watermark_pages - self.pinned_pages:
            return Fit.NEVER
        allocator = self._allocator
        if may_wait:
            fits = allocator.new_pages_needed(missing) <= allocator.num_unguarded - self.watermark_pages
        else:
            fits = allocator.pages_needed(missing) <= allocator.pages.num_available - self.watermark_pages
        return Fit.OK if fits else Fit.LATER
