"""The two-level block allocator with reference counts: five steps to find a block (Jenga, section 4).

`BlockAllocator` knows blocks, groups and requests, but no sequence, no token and no hash. All operations are O(1)
or O(log pages), apart from carving and evicting a page, which visit its blocks once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jpaged.memory.group_blocks import GroupBlocks
from jpaged.memory.pages import NO_GROUP, PROTECTED, Association, LargePages, Time


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

    def new_pages_needed(self, needs: Sequence[int]) -> int:
        """The same where protected blocks stay; to be compared with `num_unguarded` pages."""
        pages = 0
        for group, need in zip(self.groups, needs, strict=True):
            pages += -(-max(0, need - group.unprotected_spare) // group.blocks_per_page)
        return pages

    @property
    def num_unguarded(self) -> int:
        """Large pages that can be had without losing a protected block."""
        return self.pages.num_available - self.pages.num_guarded

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
            page = block // group.blocks_per_page
            if group.evictable.pop(block, None) is None:
                if group.protected.pop(block, None) is None:
                    raise RuntimeError(f"block {block} of group {g} is shared but empty")
                self._mark_used(g, page)
                self.pages.num_protected[page] -= 1
            else:
                self._mark_used(g, page)
            self.pages.num_evictable[page] -= 1
        group.ref_count[block] += 1

    def release(self, g: int, block: int, time: Time, keep: bool, protect: bool = False) -> None:
        """One owner less; without owners the block is evictable if its content is to be kept, else empty.

        Args:
            time: when it was needed last; never less than that of an earlier release in the same group.
            keep: the prefix cache knows the content.
            protect: of those kept, it is one that new requests do not evict.
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
            if protect:
                time = Time(PROTECTED + time.tick, time.minus_end)
                pages.num_protected[page] += 1
            (group.protected if protect else group.evictable)[block] = time
            pages.num_evictable[page] += 1
            pages.newest[page] = time
        else:
            self._make_empty(g, block)
        if pages.num_used[page] == 0:
            self._settle_unused(g, page)

    def unprotect(self, g: int, block: int, time: Time) -> None:
        """A protected block becomes an evictable one that was needed at `time`, not before any other's."""
        group, page = self.groups[g], block // self.groups[g].blocks_per_page
        idle = self.pages.is_idle[page]
        if idle:
            self._leave_idle(g, page)
        del group.protected[block]
        group.evictable[block] = time
        self.pages.num_protected[page] -= 1
        if idle:
            self._settle_unused(g, page)

    def discard(self, g: int, block: int) -> None:
        """An evictable block loses its content at once: it is cached elsewhere."""
        page = block // self.groups[g].blocks_per_page
        idle = self.pages.is_idle[page]
        if idle:
            self._leave_idle(g, page)
        self._evict(g, block)
        if idle:
            self._settle_unused(g, page)

    def drop_evictable(self) -> None:
        """Forget every cached block without an owner."""
        for g, group in enumerate(self.groups):
            for blocks in (group.evictable, group.protected):
                while blocks:
                    self._evict_page(g, next(iter(blocks)) // group.blocks_per_page)

    # The five steps.

    def _take_one(self, g: int, request: Association) -> int:
        group, pages = self.groups[g], self.pages
        if mine := request.open_pages[g]:  # 1: an empty block associated with the request
            page = next(reversed(mine))
        elif pages.free:  # 2: a free large page, all of it associated with the request
            page = self._carve(g, request)
        elif (idle := pages.oldest_idle()) is not None and not pages.is_guarded(idle):
            # 3: the least recently needed page nobody uses
            self._evict_page(pages.group[idle], idle)
            page = self._carve(g, request)
        elif group.open_pages:  # 4: an empty block of the group, whosever it is
            page = next(reversed(group.open_pages))
        elif group.evictable:  # 5: the least recently needed block of the group
            block = next(iter(group.evictable))
            page = block // group.blocks_per_page
            self._evict(g, block)
        elif idle is not None:  # nothing but protected blocks is left: 3 and 5 among those
            self._evict_page(pages.group[idle], idle)
            page = self._carve(g, request)
        elif group.protected:
            block = next(iter(group.protected))
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
            self._leave_idle(g, page)
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
        if group.evictable.pop(block, None) is None:
            del group.protected[block]
            self.pages.num_protected[page] -= 1
        self.pages.num_evictable[page] -= 1
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
