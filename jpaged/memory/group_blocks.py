"""The lower level of the allocator: the blocks of one layer group, by state (Jenga, section 4)."""

from __future__ import annotations

from collections import OrderedDict

from jpaged.memory.pages import Time

SHARED_PAGE_BLOCKS = 32
"""Blocks of a group in a large page from which on requests share its pages. A page that is as large as a state of a
recurrent model holds hundreds of blocks of attention: one for each request would leave most of the pool empty."""


class GroupBlocks:
    """Counts and states of the blocks of one group.

    Attributes:
        ref_count: owners of each block, by block id.
        evictable: blocks with count 0 whose content is cached, least recently needed first.
        protected: the same, but only evicted when nothing else is left, and not for new requests.
        open_pages: mixed pages with empty blocks (step 4 takes from them).
        stale_pages: mixed pages with cached blocks that nobody uses.
        shares_pages: whether empty blocks of other requests' pages are taken before a page is opened.
        num_empty: empty blocks in pages of this group.
        num_idle: pages of this group that are idle.
        num_protected_idle: protected blocks in those.
        changed: blocks whose state or count changed since somebody emptied it; None = nobody asks.
    """

    __slots__ = (
        "blocks_per_page",
        "changed",
        "evictable",
        "num_blocks",
        "num_empty",
        "num_idle",
        "num_protected_idle",
        "num_used",
        "open_pages",
        "protected",
        "ref_count",
        "shares_pages",
        "stale_pages",
    )

    def __init__(self, num_pages: int, blocks_per_page: int) -> None:
        self.blocks_per_page = blocks_per_page
        self.num_blocks = num_pages * blocks_per_page
        self.shares_pages = blocks_per_page >= SHARED_PAGE_BLOCKS
        self.ref_count = [0] * self.num_blocks
        self.evictable: OrderedDict[int, Time] = OrderedDict()
        self.protected: OrderedDict[int, Time] = OrderedDict()
        self.open_pages: OrderedDict[int, None] = OrderedDict()
        self.stale_pages: OrderedDict[int, None] = OrderedDict()
        self.num_used = 0
        self.num_empty = 0
        self.num_idle = 0
        self.num_protected_idle = 0
        self.changed: set[int] | None = None

    @property
    def spare(self) -> int:
        """Return how many blocks mixed pages can give, without taking a page that another group could get."""
        return self.num_empty + len(self.evictable) + len(self.protected) - self.num_idle * self.blocks_per_page

    @property
    def unprotected_spare(self) -> int:
        """Return `spare` without protected blocks."""
        return self.spare - len(self.protected) + self.num_protected_idle
