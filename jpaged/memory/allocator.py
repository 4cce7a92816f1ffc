"""The two-level block allocator with reference counts: five steps to find a block (Jenga, section 4).

Two cases use another order, by what they strand. A packed request (see `OpenPages`) opens a page last. A request that
takes fewer blocks than a large page holds would leave the rest of a page of its own empty for the other groups: for it
4 comes before 2, and 5 before 3 where the group's own oldest block was needed before the idle page. A request
that fills whole pages strands nothing and gives them back whole; for it 5 comes before 3 in mixed pages only.

`BlockAllocator` knows blocks, groups and requests, but no sequence, no token and no hash. All operations are O(1)
or O(log pages), apart from carving and evicting a page, which visit its blocks once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jpaged.memory.eviction_key import PROTECTED, EvictionKey
from jpaged.memory.pages import NO_GROUP, GroupBlocks, LargePages, OpenPages


class EvictableWatch(Protocol):
    """Hears of the cached blocks without an owner."""

    def kept(self, g: int, block: int, key: EvictionKey) -> None:
        """Note that a block is one of them now, or has another key; it may `discard` some of them."""

    def left(self, g: int, block: int) -> None:
        """Note that a block is none of them any more, if it was one."""


class BlockAllocator:
    """Gives requests blocks of every group from one set of large pages, and takes them back.

    Args:
        blocks_per_page: number of blocks in a large page, for each group.
        num_pages: large pages in the pool.
        on_evict: called with (group, block) when a cached block loses its content; it changes no block.
        after_evicting: called when all blocks that were to be evicted are; it may `discard` more.

    Attributes:
        watch: hears of the cached blocks without an owner; None = nothing needs it.
    """

    def __init__(
        self,
        blocks_per_page: Sequence[int],
        num_pages: int,
        on_evict: Callable[[int, int], None],
        after_evicting: Callable[[], None] = lambda: None,
    ) -> None:
        self.pages = LargePages(num_pages)
        self.groups = [GroupBlocks(num_pages, n) for n in blocks_per_page]
        self._on_evict = on_evict
        self._after_evicting = after_evicting
        self.watch: EvictableWatch | None = None

    def new_request(self) -> OpenPages:
        """Return the open pages of a new request: none yet."""
        return OpenPages(len(self.groups))

    def pages_needed(self, needs: Sequence[int], spare: Sequence[int] | None = None) -> int:
        """Return how many large pages `needs` (blocks of each group) takes beyond the spare blocks of mixed pages.

        Args:
            spare: more blocks of each group that mixed pages will have to spare, in addition to those they have now.
        """
        pages = 0
        for g, (group, need) in enumerate(zip(self.groups, needs, strict=True)):
            if need and (gap := need - group.spare - (spare[g] if spare else 0)) > 0:
                pages += -(-gap // group.blocks_per_page)
        return pages

    def new_pages_needed(self, needs: Sequence[int], spare: Sequence[int] | None = None) -> int:
        """Return the same as `pages_needed` where protected blocks stay; `num_unguarded` says how many can be had."""
        pages = 0
        for g, (group, need) in enumerate(zip(self.groups, needs, strict=True)):
            if need and (gap := need - group.unprotected_spare - (spare[g] if spare else 0)) > 0:
                pages += -(-gap // group.blocks_per_page)
        return pages

    def has_below(self, g: int, level: int, request: OpenPages) -> bool:
        """Tell whether a request can have a block of a group while all cached blocks of a level above `level`, and the
        protected ones, stay."""
        group, pages = self.groups[g], self.pages
        if group.open_pages:
            return True
        if request.packed and group.stale_pages:
            oldest = group.evictable.get(self._oldest_block(g, next(iter(group.stale_pages))))
            return oldest is not None and oldest.level <= level
        if pages.free:
            return True
        idle = pages.oldest_idle()
        if idle is not None and not pages.is_guarded(idle) and pages.newest[idle].level <= level:
            return True
        first = next(iter(group.evictable), None)
        return first is not None and group.evictable[first].level <= level

    @property
    def num_unguarded(self) -> int:
        """Return how many large pages can be had without losing a protected block."""
        return self.pages.num_available - self.pages.num_guarded

    def take(self, needs: Sequence[int], request: OpenPages) -> list[list[int]] | None:
        """Return blocks of each group for `request`, with count 1; None, with nothing changed, if some cannot be had.

        Each block is found by the five steps. Groups that must get a large page take theirs before any group
        takes one by preference only, so an allocation that `pages_needed` allows never fails.
        """
        pages = self.pages_needed(needs)
        if pages > self.pages.num_available:
            return None
        taken: list[list[int]] = [[] for _ in needs]
        missing = [g for g, need in enumerate(needs) if need]
        if pages:
            for g in missing:
                while (left := needs[g] - len(taken[g])) and left > self.groups[g].spare:
                    taken[g].append(self._take_one(g, request, left))
        for g in missing:
            while len(taken[g]) < needs[g]:
                taken[g].append(self._take_one(g, request, needs[g] - len(taken[g])))
        self._after_evicting()
        return taken

    def share(self, g: int, block: int) -> None:
        """Count one more owner of a used or evictable block."""
        group = self.groups[g]
        self._check(g, block)
        if group.changed is not None:
            group.changed.add(block)
        if group.ref_count[block] == 0:
            pages, page = self.pages, block // group.blocks_per_page
            is_protected = group.evictable.pop(block, None) is None
            if is_protected and group.protected.pop(block, None) is None:
                raise RuntimeError(f"block {block} of group {g} is shared but empty")
            was_idle = pages.is_idle[page]
            if was_idle:
                self._mark_used(g, page)
            else:  # its empty blocks are those that are listed
                group.num_used += 1
                pages.num_used[page] += 1
            pages.num_protected[page] -= is_protected
            pages.num_evictable[page] -= 1
            if was_idle or not pages.num_evictable[page]:
                self._list_stale(g, page)
            if self.watch is not None:
                self.watch.left(g, block)
        group.ref_count[block] += 1

    def share_all(self, g: int, blocks: Sequence[int]) -> None:
        """Count one more owner of each of some used or evictable blocks of a group."""
        ref_count = self._touched(g, blocks)
        for block in blocks:
            if ref_count[block]:
                ref_count[block] += 1
            else:
                self.share(g, block)

    def release_owned(self, g: int, blocks: Sequence[int]) -> None:
        """Count one owner less of each of some blocks of a group that have others."""
        ref_count = self._touched(g, blocks)
        for block in blocks:
            if ref_count[block] < 2:
                raise RuntimeError(f"block {block} of group {g} is released but has no other owner")
            ref_count[block] -= 1

    def release(self, g: int, block: int, time: EvictionKey, keep: bool, protect: bool = False) -> None:
        """Count one owner less; a block without owners is evictable if its content is kept, else empty.

        Args:
            time: its last need; never less than that of an earlier release in the same group, at the same level.
            keep: whether the content is kept, as the prefix cache knows it.
            protect: whether new requests may not evict a block that is kept.
        """
        group = self.groups[g]
        self._check(g, block)
        count = group.ref_count[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} of group {g} is released but has no owner")
        group.ref_count[block] = count
        if group.changed is not None:
            group.changed.add(block)
        if count:
            return
        pages = self.pages
        page = block // group.blocks_per_page
        group.num_used -= 1
        pages.num_used[page] -= 1
        if keep:
            if protect:
                time = EvictionKey(PROTECTED + time.tick, time.negative_end)
                pages.num_protected[page] += 1
            (group.protected if protect else group.evictable)[block] = time
            pages.num_evictable[page] += 1
            pages.newest[page] = time
            if pages.num_evictable[page] == 1:
                self._list_stale(g, page)
        elif pages.num_used[page] or pages.num_evictable[page]:
            self._make_empty(g, block)
        else:  # the page is free at once, and is not listed before
            pages.empty[page].append(block)
            group.num_empty += 1
        if pages.num_used[page] == 0:
            self._settle_unused(g, page)
        if keep and self.watch is not None:
            self.watch.kept(g, block, time)

    def requeue(self, g: int, block: int, time: EvictionKey) -> None:
        """Make a protected or evictable block an evictable one that was needed at `time`, which is not before any
        other's of its level."""
        group, page = self.groups[g], block // self.groups[g].blocks_per_page
        idle = self.pages.is_idle[page]
        if group.changed is not None:
            group.changed.add(block)
        if idle:
            self._leave_idle(g, page)
        if group.evictable.pop(block, None) is None:
            del group.protected[block]
            self.pages.num_protected[page] -= 1
        group.evictable[block] = self.pages.newest[page] = time
        if idle:
            self._settle_unused(g, page)
        if self.watch is not None:
            self.watch.kept(g, block, time)

    def discard(self, g: int, block: int) -> None:
        """Evict one block at once, because its content is cached elsewhere or useless."""
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
        self._after_evicting()

    def evict_idle_page(self) -> bool:
        """Evict the least recently needed page without a used block, which is free then; return False if there is
        none."""
        page = self.pages.oldest_idle()
        if page is None:
            return False
        self._evict_page(self.pages.group[page], page)
        return True

    # The five steps.

    def _take_one(self, g: int, request: OpenPages, left: int) -> int:
        """Return a block of a group, with count 1.

        Args:
            left: blocks that the request still takes of this group at once, this one included.
        """
        group, pages = self.groups[g], self.pages
        strands = left < group.blocks_per_page
        if mine := request.by_group[g]:  # 1: an empty block associated with the request
            page = next(reversed(mine))
        elif request.packed and group.open_pages:  # before a page is opened: 4, and 5 in mixed pages
            page = next(reversed(group.open_pages))
        elif request.packed and group.stale_pages:
            page = next(iter(group.stale_pages))
            self._evict(g, self._oldest_block(g, page))
        elif strands and group.open_pages:  # 4, before a page is opened for one request
            page = next(reversed(group.open_pages))
        elif pages.free:  # 2: a free large page, all of it associated with the request
            page = self._carve(g, request)
        elif (block := self._older_than_idle(g, mixed=not strands)) is not None:  # 5, where that is lost first
            page = block // group.blocks_per_page
            self._evict(g, block)
        elif (idle := pages.oldest_idle()) is not None and not pages.is_guarded(idle):
            # 3: the least recently needed page without a used block
            self._evict_page(pages.group[idle], idle)
            page = self._carve(g, request)
        elif group.open_pages:  # 4: an empty block of the group, in any request's page
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
        if group.changed is not None:
            group.changed.add(block)
        return block

    def _older_than_idle(self, g: int, *, mixed: bool) -> int | None:
        """Return the group's least recently needed block without an owner, if no idle page was needed before it; else
        None.

        Args:
            mixed: whether the block has to lie in a mixed page: an idle one is worth more as a whole.
        """
        group = self.groups[g]
        if group.blocks_per_page == 1 or not group.evictable:
            return None
        block, time = next(iter(group.evictable.items()))
        if mixed and self.pages.is_idle[block // group.blocks_per_page]:
            return None
        idle = self.pages.oldest_idle()
        return block if idle is None or time <= self.pages.newest[idle] else None

    def _oldest_block(self, g: int, page: int) -> int:
        """Return the least recently needed of a page's cached blocks without an owner; a protected one only if all
        are."""
        group, first = self.groups[g], page * self.groups[g].blocks_per_page
        mine = range(first, first + group.blocks_per_page)
        cached = ((group.evictable.get(block) or group.protected.get(block), block) for block in mine)
        return min((time, block) for time, block in cached if time)[1]

    # The ways from one state to another: all counts and lists stay true.

    def _carve(self, g: int, request: OpenPages) -> int:
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
            owner.by_group[g][page] = None
        else:
            group.open_pages.pop(page, None)
            owner.by_group[g].pop(page, None)

    def _list_stale(self, g: int, page: int) -> None:
        """List a mixed page as stale if it has cached blocks without an owner, else unlist it."""
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
        if (
            pages.empty[page]
            or pages.num_protected[page]
            or pages.is_guarded(page)
            or group.evictable.has_high_levels
            or pages.newest[page].level
        ):
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
        if self.watch is not None:
            self.watch.left(g, block)
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
        owner.by_group[g].pop(page, None)
        self.groups[g].num_empty -= len(pages.empty[page])
        pages.empty[page] = []
        if pages.changed is not None:
            pages.changed.add(page)
        pages.group[page] = NO_GROUP
        pages.owner[page] = None
        pages.free.appendleft(page)

    def _check(self, g: int, block: int) -> None:
        """Refuse an id out of range: JAX clamps an out-of-range gather silently, so no such id may leave this class."""
        if not 0 <= block < self.groups[g].num_blocks:
            raise RuntimeError(f"block {block} of group {g} is outside [0, {self.groups[g].num_blocks})")

    def _touched(self, g: int, blocks: Sequence[int]) -> list[int]:
        """Check blocks of a group, note that they change, and return the group's counts of owners."""
        group = self.groups[g]
        if blocks:
            self._check(g, min(blocks))
            self._check(g, max(blocks))
        if group.changed is not None:
            group.changed.update(blocks)
        return group.ref_count
