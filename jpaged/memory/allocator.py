"""The two-level block allocator with reference counts: five steps to find a block (Jenga, section 4).

`BlockAllocator` knows blocks, groups and requests, but no sequence, no token and no hash. All operations are O(1)
or O(log pages), apart from carving and evicting a page, which visit its blocks once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from jpaged.memory.pages import NO_GROUP, Association, LargePages, Time


class GroupBlocks:
    """The lower level: blocks of one group.

    Attributes:
        ref_count: owners of each block, by block id.
        evictable: blocks with count 0 whose content is cached, least recently needed first.
        open_pages: mixed pages with empty blocks (step 4 takes from them).
        num_empty: empty blocks in pages of this group.
        num_idle: pages of this group that are idle.
    """

    __slots__ = (
        "blocks_per_page",
        "evictable",
        "num_blocks",
        "num_empty",
        "num_idle",
        "num_used",
        "open_pages",
        "ref_count",
    )

    def __init__(self, num_pages: int, blocks_per_page: int) -> None:
        self.blocks_per_page = blocks_per_page
        self.num_blocks = num_pages * blocks_per_page
        self.ref_count = [0] * self.num_blocks
        self.evictable: OrderedDict[int, Time] = OrderedDict()
        self.open_pages: OrderedDict[int, None] = OrderedDict()
        self.num_used = 0
        self.num_empty = 0
        self.num_idle = 0

    @property
    def spare(self) -> int:
        """Blocks to be had from mixed pages, without taking a page that another group could get."""
        return self.num_empty + len(self.evictable) - self.num_idle * self.blocks_per_page


class BlockAllocator:
    """Hands out blocks of every group from one set of large pages.

    Args:
        blocks_per_page: of each group.
        num_pages: large pages in the pool.
        on_evict: called with (group, block) when a cached block loses its content.
    """

    def __init__(self, blocks_per_page: Sequence[int], num_pages: int, on_evict: Callable[[int, int], None]) -> None:
        self.pages = LargePages(num_pages)
        self.groups = [GroupBlocks(num_pages, n) for n in blocks_per_page]
        self._on_evict = on_evict

    def associate(self) -> Association:
        """Placement state for a new request."""
        return Association(len(self.groups))

    def pages_needed(self, needs: Sequence[int]) -> int:
        """Large pages that `needs` (blocks of each group) takes beyond what mixed pages have to spare."""
        pages = 0
        for group, need in zip(self.groups, needs, strict=True):
            if need and (gap := need - group.spare) > 0:
                pages += -(-gap // group.blocks_per_page)
        return pages

    def take(self, needs: Sequence[int], request: Association) -> list[list[int]] | None:
        """Blocks of each group for `request`, with count 1; None, with nothing changed, if some cannot be had.

        Each block is found by the five steps. Groups that must get a large page take theirs before any group
        takes one by preference only, hence what `pages_needed` promises is always delivered.
        """
        if self.pages_needed(needs) > self.pages.num_available:
            return None
        taken: list[list[int]] = [[] for _ in needs]
        missing = [g for g, need in enumerate(needs) if need]
        for g in missing:
            while needs[g] - len(taken[g]) > self.groups[g].spare:
                taken[g].append(self._take_one(g, request))
        for g in missing:
            while len(taken[g]) < needs[g]:
                taken[g].append(self._take_one(g, request))
        return taken

    def share(self, g: int, block: int) -> None:
        """One more owner of a used or evictable block."""
        group = self.groups[g]
        self._check(g, block)
        if group.ref_count[block] == 0:
            if group.evictable.pop(block, None) is None:
                raise RuntimeError(f"block {block} of group {g} is shared but empty")
            page = block // group.blocks_per_page
            self.pages.num_evictable[page] -= 1
            self._mark_used(g, page)
        group.ref_count[block] += 1

    def release(self, g: int, block: int, time: Time, keep: bool) -> None:
        """One owner less; without owners the block is evictable if its content is to be kept, else empty.

        Args:
            time: when it was needed last; never less than that of an earlier release in the same group.
            keep: the prefix cache knows the content.
        """
        group = self.groups[g]
        self._check(g, block)
        count = group.ref_count[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} of group {g} is released but nobody owns it")
        group.ref_count[block] = count
        if count:
            return
        pages = self.pages
        page = block // group.blocks_per_page
        group.num_used -= 1
        pages.num_used[page] -= 1
        if keep:
            group.evictable[block] = time
            pages.num_evictable[page] += 1
            pages.newest[page] = time
        else:
            self._make_empty(g, block)
        if pages.num_used[page] == 0:
            self._settle_unused(g, page)

    def drop_evictable(self) -> None:
        """Forget every cached block without an owner."""
        for g, group in enumerate(self.groups):
            while group.evictable:
                self._evict_page(g, next(iter(group.evictable)) // group.blocks_per_page)

    # The five steps.

    def _take_one(self, g: int, request: Association) -> int:
        group, pages = self.groups[g], self.pages
        if mine := request.open_pages[g]:  # 1: an empty block associated with the request
            page = next(reversed(mine))
        elif pages.free:  # 2: a free large page, all of it associated with the request
            page = self._carve(g, request)
        elif (idle := pages.oldest_idle()) is not None:  # 3: the least recently needed page nobody uses
            self._evict_page(pages.group[idle], idle)
            page = self._carve(g, request)
        elif group.open_pages:  # 4: an empty block of the group, whosever it is
            page = next(reversed(group.open_pages))
        elif group.evictable:  # 5: the least recently needed block of the group
            block = next(iter(group.evictable))
            page = block // group.blocks_per_page
            self._evict(g, block)
        else:
            raise RuntimeError(f"group {g} has no block left: check pages_needed first")
        block = pages.empty[page].pop()
        group.num_empty -= 1
        self._mark_used(g, page)
        self._check(g, block)
        group.ref_count[block] = 1
        return block

    def _carve(self, g: int, request: Association) -> int:
        group, pages = self.groups[g], self.pages
        page = pages.free.popleft()
        first = page * group.blocks_per_page
        pages.group[page] = g
        pages.owner[page] = request
        pages.empty[page] = list(range(first + group.blocks_per_page - 1, first - 1, -1))
        group.num_empty += group.blocks_per_page
        return page

    # Transitions of pages.

    def _mark_used(self, g: int, page: int) -> None:
        """A block of `page`, already taken out of the empty or evictable ones, is used from now on."""
        pages = self.pages
        self.groups[g].num_used += 1
        pages.num_used[page] += 1
        if pages.is_idle[page]:
            pages.leave_idle(page)
            self.groups[g].num_idle -= 1
        self._list_open(g, page)

    def _list_open(self, g: int, page: int) -> None:
        """List a mixed page as open if it has empty blocks, else unlist it."""
        group, owner = self.groups[g], self.pages.owner[page]
        assert owner is not None
        if self.pages.empty[page]:
            group.open_pages[page] = None
            owner.open_pages[g][page] = None
        else:
            group.open_pages.pop(page, None)
            owner.open_pages[g].pop(page, None)

    def _settle_unused(self, g: int, page: int) -> None:
        """The last used block of `page` was released: the page becomes idle or free."""
        group, pages = self.groups[g], self.pages
        group.open_pages.pop(page, None)
        if not pages.num_evictable[page]:
            self._free_page(g, page)
            return
        if pages.empty[page]:
            # The newest block may have been hit and emptied since: look again. Rare, as tails go first.
            first = page * group.blocks_per_page
            mine = range(first, first + group.blocks_per_page)
            pages.newest[page] = max(group.evictable[b] for b in mine if b in group.evictable)
        pages.make_idle(page)
        group.num_idle += 1

    def _make_empty(self, g: int, block: int) -> None:
        page = block // self.groups[g].blocks_per_page
        self.pages.empty[page].append(block)
        self.groups[g].num_empty += 1
        self._list_open(g, page)

    def _evict(self, g: int, block: int) -> None:
        """Take the content from an evictable block."""
        group = self.groups[g]
        del group.evictable[block]
        self.pages.num_evictable[block // group.blocks_per_page] -= 1
        self._make_empty(g, block)
        self._on_evict(g, block)

    def _evict_page(self, g: int, page: int) -> None:
        """Evict all evictable blocks of a page; an idle page is free afterwards."""
        group = self.groups[g]
        first = page * group.blocks_per_page
        for block in range(first, first + group.blocks_per_page):
            if block in group.evictable:
                self._evict(g, block)
        if self.pages.is_idle[page]:
            self.pages.leave_idle(page)
            group.num_idle -= 1
            group.open_pages.pop(page, None)
            self._free_page(g, page)

    def _free_page(self, g: int, page: int) -> None:
        """All blocks of `page` are empty: any group may have it."""
        pages = self.pages
        owner = pages.owner[page]
        assert owner is not None
        owner.open_pages[g].pop(page, None)
        self.groups[g].num_empty -= len(pages.empty[page])
        pages.empty[page] = []
        pages.group[page] = NO_GROUP
        pages.owner[page] = None
        pages.free.append(page)

    def _check(self, g: int, block: int) -> None:
        """JAX clamps an out-of-range gather silently, so no such id may ever leave this class."""
        if not 0 <= block < self.groups[g].num_blocks:
            raise RuntimeError(f"block {block} of group {g} is outside [0, {self.groups[g].num_blocks})")
