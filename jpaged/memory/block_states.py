"""The states of blocks and large pages, and every way from one state to another (see `pages` for the states).

`BlockStates` keeps all counts and lists true when a block or a page changes its state; which block is to change is
decided by `BlockAllocator`.
"""

from __future__ import annotations

from collections.abc import Callable

from jpaged.memory.group_blocks import GroupBlocks
from jpaged.memory.pages import NO_GROUP, Association, LargePages


class BlockStates:
    """Blocks of every group in one set of large pages.

    Args:
        pages: the large pages, all free.
        groups: one for each layer group, without any block.
        on_evict: called with (group, block) when a cached block loses its content.
    """

    def __init__(self, pages: LargePages, groups: list[GroupBlocks], on_evict: Callable[[int, int], None]) -> None:
        self.pages = pages
        self.groups = groups
        self._on_evict = on_evict

    def _carve(self, g: int, request: Association) -> int:
        group, pages = self.groups[g], self.pages
        page = pages.free.popleft()
        pages.touched.add(page)
        if pages.changed is not None:
            pages.changed.add(page)
        first = page * group.blocks_per_page
        pages.group[page] = g
        pages.owner[page] = request
        pages.empty[page] = list(range(first + group.blocks_per_page - 1, first - 1, -1))
        group.num_empty += group.blocks_per_page
        return page

    def _mark_used(self, g: int, page: int) -> None:
        """Count a block of `page`, already taken out of the empty or evictable ones, as used from now on."""
        pages = self.pages
        self.groups[g].num_used += 1
        pages.num_used[page] += 1
        if pages.is_idle[page]:
            self._leave_idle(g, page)
            self._list_stale(g, page)
        if self.groups[g].blocks_per_page > 1:  # a page of one block is never open while that is used
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

    def _list_stale(self, g: int, page: int) -> None:
        """List a mixed page as stale if it has cached blocks that nobody uses, else unlist it."""
        if self.pages.num_used[page] and self.pages.num_evictable[page]:
            self.groups[g].stale_pages[page] = None
        else:
            self.groups[g].stale_pages.pop(page, None)

    def _settle_unused(self, g: int, page: int) -> None:
        """Make `page`, whose last used block was released, idle or free."""
        group, pages = self.groups[g], self.pages
        group.open_pages.pop(page, None)
        group.stale_pages.pop(page, None)
        if not pages.num_evictable[page]:
            self._free_page(g, page)
            return
        if pages.empty[page] or pages.num_protected[page] or pages.is_guarded(page):
            # The newest block may have been hit and emptied since, or is not the last released: look again.
            first = page * group.blocks_per_page
            mine = range(first, first + group.blocks_per_page)
            cached = (group.evictable.get(block) or group.protected.get(block) for block in mine)
            pages.newest[page] = max(time for time in cached if time)
        pages.make_idle(page)
        group.num_idle += 1
        group.num_protected_idle += pages.num_protected[page]

    def _leave_idle(self, g: int, page: int) -> None:
        self.pages.leave_idle(page)
        self.groups[g].num_idle -= 1
        self.groups[g].num_protected_idle -= self.pages.num_protected[page]

    def _make_empty(self, g: int, block: int) -> None:
        page = block // self.groups[g].blocks_per_page
        self.pages.empty[page].append(block)
        self.groups[g].num_empty += 1
        self._list_open(g, page)

    def _evict(self, g: int, block: int) -> None:
        """Take the content from an evictable block."""
        group, page = self.groups[g], block // self.groups[g].blocks_per_page
        if group.changed is not None:
            group.changed.add(block)
        if group.evictable.pop(block, None) is None:
            del group.protected[block]
            self.pages.num_protected[page] -= 1
        self.pages.num_evictable[page] -= 1
        self._list_stale(g, page)
        self._make_empty(g, block)
        self._on_evict(g, block)

    def _evict_page(self, g: int, page: int) -> None:
        """Evict all evictable blocks of a page; an idle page is free afterwards."""
        group = self.groups[g]
        first, idle = page * group.blocks_per_page, self.pages.is_idle[page]
        if idle:
            self._leave_idle(g, page)
        for block in range(first, first + group.blocks_per_page):
            if block in group.evictable or block in group.protected:
                self._evict(g, block)
        if idle:
            group.open_pages.pop(page, None)
            self._free_page(g, page)

    def _free_page(self, g: int, page: int) -> None:
        """Give back a page whose blocks are all empty: any group may have it."""
        pages = self.pages
        owner = pages.owner[page]
        assert owner is not None
        owner.open_pages[g].pop(page, None)
        self.groups[g].num_empty -= len(pages.empty[page])
        pages.empty[page] = []
        if pages.changed is not None:
            pages.changed.add(page)
        pages.group[page] = NO_GROUP
        pages.owner[page] = None
        pages.free.appendleft(page)
