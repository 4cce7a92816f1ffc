"""The upper level of the allocator: large pages, each free or carved into the blocks of one group (Jenga, section 4).

A block is used (reference count > 0), evictable (count 0, content cached) or empty. A large page is

    free    all its blocks empty; it belongs to no group
    idle    no block used, at least one evictable: it can be evicted as a whole
    mixed   at least one block used
"""

from __future__ import annotations

from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush

from jpaged.memory.eviction_key import PROTECTED, EvictionKey
from jpaged.memory.eviction_queue import EvictionQueue

NO_GROUP = -1


class OpenPages:
    """The pages carved for one request that still have empty blocks, by group (request-aware placement).

    It is never dissolved: once its request has ended, no allocation uses it.

    Attributes:
        packed: whether the request's blocks go where they open the fewest large pages, at the price of blocks cached in
            mixed pages. If the request runs alone, a group then never has more pages than its blocks fill: a page is
            opened only while every block of the others is used.
    """

    __slots__ = ("by_group", "packed")

    def __init__(self, num_groups: int) -> None:
        self.packed = False
        # OrderedDict as a stack with O(1) removal anywhere; a plain dict scans over deleted entries.
        self.by_group: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_groups)]


class LargePages:
    """Owner and block counts of every large page; free pages are kept in order, idle ones by time."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free: deque[int] = deque(range(num_pages))  # those used last come first: their memory is there already
        self.touched: set[int] = set()  # carved since `take_vacated` last saw them free
        self.resting: set[int] = set()  # free when it was last called, and carved before: their memory is there
        self.changed: set[int] | None = None  # carved or freed since the last map; None = no map was taken
        self.group = [NO_GROUP] * num_pages
        self.owner: list[OpenPages | None] = [None] * num_pages
        self.empty: list[list[int]] = [[] for _ in range(num_pages)]  # stacks of block ids
        self.num_used = [0] * num_pages
        self.num_evictable = [0] * num_pages  # protected ones among them
        self.num_protected = [0] * num_pages
        self.newest: list[EvictionKey] = [EvictionKey(0, 0)] * num_pages
        self.is_idle = bytearray(num_pages)
        self.num_idle = 0
        self.num_guarded = 0  # idle pages with protected blocks
        self._idle_heap: list[tuple[EvictionKey, int]] = []

    @property
    def num_available(self) -> int:
        """Return how many pages steps 2 and 3 of an allocation can hand out: those that are free or idle."""
        return len(self.free) + self.num_idle

    def take_vacated(self, *, at_once: bool = False) -> list[int]:
        """Return free pages, carved once, that nothing was put into since the last call: memory that holds nothing and
        is not about to. `at_once` adds those that were in use since."""
        unused = self.resting - self.touched
        vacated = {page for page in self.touched if self.group[page] == NO_GROUP}
        self.touched -= vacated
        self.resting = set() if at_once else vacated
        return sorted(unused | vacated if at_once else unused)

    def make_idle(self, page: int) -> None:
        """List `page`, whose `newest` is set, among those that can be evicted whole."""
        self.is_idle[page] = True
        self.num_idle += 1
        self.num_guarded += self.is_guarded(page)
        heap = self._idle_heap
        heappush(heap, (self.newest[page], page))
        if len(heap) > 2 * self.num_pages + 64:  # pages that left the state are still in it: drop them
            heap[:] = [(self.newest[p], p) for p in range(self.num_pages) if self.is_idle[p]]
            heapify(heap)

    def leave_idle(self, page: int) -> None:
        """Take `page`, of which a block is used again, out of the idle ones; its heap entry goes stale and is skipped
        later."""
        self.is_idle[page] = False
        self.num_idle -= 1
        self.num_guarded -= self.is_guarded(page)

    def is_guarded(self, page: int) -> bool:
        """Tell whether an idle page has protected blocks."""
        return self.newest[page].tick >= PROTECTED

    def oldest_idle(self) -> int | None:
        """Return the idle page whose newest block is the oldest, or None. O(log n)."""
        heap = self._idle_heap
        while heap:
            time, page = heap[0]
            if self.is_idle[page] and self.newest[page] == time:
                return page
            heappop(heap)
        return None


class GroupBlocks:
    """Counts and states of the blocks of one group.

    Attributes:
        ref_count: owners of each block, by block id.
        evictable: blocks with count 0 whose content is cached, those of the lowest priority and least recently needed
            first.
        protected: the same, but only evicted when nothing else is left, and not for new requests.
        open_pages: mixed pages with empty blocks (step 4 takes from them).
        stale_pages: mixed pages with cached blocks that no sequence uses.
        num_empty: empty blocks in pages of this group.
        num_idle: pages of this group that are idle.
        num_protected_idle: protected blocks in those.
        changed: blocks whose state or count changed since the last map; None = no map was taken.
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
        "stale_pages",
    )

    def __init__(self, num_pages: int, blocks_per_page: int) -> None:
        self.blocks_per_page = blocks_per_page
        self.num_blocks = num_pages * blocks_per_page
        self.ref_count = [0] * self.num_blocks
        self.evictable = EvictionQueue()
        self.protected: OrderedDict[int, EvictionKey] = OrderedDict()
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
