"""Maps content to its place in a tier, within a bound; pages of the lowest priority are dropped first, and of these the
least recently needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jpaged.memory.event_log import MediumEvents
from jpaged.memory.hash_chain import Link
from jpaged.memory.tiers.page_order import PageOrder
from jpaged.memory.tiers.tenant_blocks import TenantBlocks

OPEN_PART = 8
"""The tier over the pages that blocks can always get, from the default priority on, but for one a layer group at least.
A higher priority may have no end, and a tier full of such blocks would never take another, not even after a restart."""


class StoredBlock(NamedTuple):
    """A block in a tier.

    Attributes:
        digest, tokens: see `Link`.
        place: offset in the store, in bytes.
        tenant: see `Link`.
        level, until: its priority less the default, and when that ends, see `TierIndex.put`.
    """

    group: int
    digest: bytes
    tokens: bytes
    place: int
    num_bytes: int
    tenant: bytes = b""
    level: int = 0
    until: float = math.inf


@dataclass
class _Page:
    """A large page in use.

    Attributes:
        blocks: those that were put into it, by slot.
        num_given: slots from its beginning that were given to blocks.
        holes: slots among them to be given again.
    """

    group: int
    blocks: dict[int, StoredBlock] = field(default_factory=dict)
    num_given: int = 0
    holes: list[int] = field(default_factory=list)


class TierIndex:
    """Maps content to its place in a store that is cut as the pool is: into large pages, each with blocks of one group.

    A page has blocks of one priority, and is filled from its beginning. When none is free, `PageOrder` says which is
    dropped whole, but for `OPEN_PART`, so that blocks of all sizes share the store and no gap stays. A salt that has as
    much as it may loses its own blocks, whose places are used again at once.

    Args:
        block_bytes: size of a block, for each group; each divides `page_bytes`.
        page_bytes: size of a large page.
        num_pages: large pages that the store has.
        salt_bytes: most bytes of one cache salt; None = no limit.

    Attributes:
        watch: hears of each content that is found from now on, or no longer; None = nothing does.
    """

    def __init__(
        self, block_bytes: Sequence[int], page_bytes: int, num_pages: int, *, salt_bytes: int | None = None
    ) -> None:
        self.salt_bytes = salt_bytes
        self.watch: MediumEvents | None = None
        self.block_bytes = block_bytes
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        if self.watch is not None:
            self.watch.cleared()
        self._blocks: list[dict[bytes, StoredBlock]] = [{} for _ in self.block_bytes]
        self._pages: dict[int, _Page] = {}
        self._order = PageOrder()
        self._open: dict[tuple[int, int], tuple[int, _Page]] = {}  # the page that is filled, by group and level
        self._holed: dict[tuple[int, int], list[int]] = {}  # pages that may have holes, by group and level
        self._tenants = TenantBlocks(self.salt_bytes)
        self._num_new = 0  # pages that were ever used
        self._free: list[int] = []  # pages that were used and given back
        self._unsent: set[tuple[int, bytes]] = set()  # have a place, but are not on their way to it yet

    def __len__(self) -> int:
        """Return how many blocks can be found."""
        return sum(map(len, self._blocks))

    @property
    def num_bytes(self) -> int:
        """Return the size of the pages in use."""
        return len(self._pages) * self.page_bytes

    def watch_by(self, watch: MediumEvents) -> None:
        """Tell of the contents from now on, beginning with those that are there."""
        self.watch = watch
        for blocks in self._blocks:
            for stored in blocks.values():
                watch.stored(stored.group, Link(stored.digest, stored.tokens))

    def find(self, g: int, link: Link) -> StoredBlock | None:
        """Return the block of group `g` with this content, or None; the tokens are compared too, not only the
        digest."""
        stored = self._blocks[g].get(link.digest)
        return stored if stored is not None and stored.tokens == link.tokens else None

    def readable(self, g: int, links: Iterable[Link]) -> list[StoredBlock | None]:
        """Return what `find` does of those of some contents that a read which begins now finds, None for the others:
        the store writes and reads in order."""
        stored, unsent = self._blocks[g].get, self._unsent
        return [
            one
            if (one := stored(link.digest)) is not None and one.tokens == link.tokens and (g, link.digest) not in unsent
            else None
            for link in links
        ]

    def place(self, g: int, link: Link) -> int | None:
        """Return where a block lies; None = it cannot be found."""
        stored = self.find(g, link)
        return None if stored is None else stored.place

    def holds(self, stored: StoredBlock) -> bool:
        """Tell whether this very block can be found, not one that was put later."""
        return self._blocks[stored.group].get(stored.digest) is stored

    def touch(self, stored: StoredBlock) -> None:
        """Note that a block that can be found is needed now."""
        self._order.touch(stored.place // self.page_bytes)
        self._tenants.touch(stored.place)

    def put(self, g: int, link: Link, level: int = 0, until: float = math.inf) -> StoredBlock | None:
        """Give content a place, for which others of no higher priority may be forgotten, and see `OPEN_PART`; None
        where there is none, or the digest has one. A read finds it after `sent`.

        Args:
            level: its priority less the default.
            until: when that ends.
        """
        size = self.block_bytes[g]
        if link.digest in self._blocks[g] or not self.num_pages:
            return None
        if self.salt_bytes is not None and link.tenant:
            if size > self.salt_bytes:
                return None
            while (least := self._tenants.too_much(link.tenant, size)) is not None:
                self._vacate(least)
        if (free := self._next_slot(g, level)) is None:
            return None
        number, slot = free
        place = number * self.page_bytes + slot * size
        stored = StoredBlock(g, link.digest, link.tokens, place, size, link.tenant, level, until)
        self._pages[number].blocks[slot] = stored
        self._blocks[g][link.digest] = stored
        self._unsent.add((g, link.digest))
        if self.watch is not None:
            self.watch.stored(g, link)
        if self.salt_bytes is not None:
            self._tenants.add(stored.place, size, link.tenant)
        if level:
            self._order.extend(number, until)
        self._order.touch(number)
        return stored

    def end_levels(self, now: float) -> None:
        """Let the priorities end whose time is over."""
        self._order.end_levels(now)

    def sent(self) -> None:
        """Note that all blocks with a place are on disk, or on their way there."""
        self._unsent.clear()

    def forget(self, stored: StoredBlock) -> None:
        """Hide a damaged or dropped block; its place is reclaimed with its page."""
        if self._blocks[stored.group].get(stored.digest) == stored:
            del self._blocks[stored.group][stored.digest]
            self._tenants.remove(stored.place)
            if self.watch is not None:
                self.watch.removed(stored.group, Link(stored.digest, stored.tokens))

    def load(self, blocks: Iterable[StoredBlock]) -> None:
        """Take in blocks that are in the store already, in the order in which they were written.

        Pages that they do not fill stay so. Salts that may have less than they did lose what they needed longest ago.
        """
        for stored in blocks:
            number, size = stored.place // self.page_bytes, self.block_bytes[stored.group]
            page = self._pages.get(number)
            if page is None or page.group != stored.group or stored.place % self.page_bytes == 0:
                if page is not None:
                    self._drop(number)
                page = self._add_page(number, stored.group, stored.level)
            slot = stored.place % self.page_bytes // size
            if (before := page.blocks.pop(slot, None)) is not None:
                self.forget(before)
            if stored.num_bytes == size and stored.digest not in self._blocks[stored.group]:
                page.blocks[slot], page.num_given = stored, max(page.num_given, slot + 1)
                self._blocks[stored.group][stored.digest] = stored
                if self.watch is not None:
                    self.watch.stored(stored.group, Link(stored.digest, stored.tokens))
                self._tenants.add(stored.place, size, stored.tenant)
                if stored.level:
                    self._order.extend(number, stored.until)
                self._order.touch(number)
        self._num_new = max(self._pages, default=-1) + 1
        self._free = [number for number in range(self._num_new) if number not in self._pages]
        for tenant in self._tenants.num_bytes():
            while (least := self._tenants.too_much(tenant, 0)) is not None:
                self._vacate(least)
        self.limit(self.num_pages)

    def forget_unsent(self) -> None:
        """Forget the blocks whose bytes will not come, because the step that was to send them is given up."""
        for g, digest in self._unsent:
            if (stored := self._blocks[g].get(digest)) is not None:
                self.forget(stored)
        self._unsent.clear()

    def limit(self, num_pages: int) -> list[int]:
        """Set how many pages may be in use; return the numbers of those that are dropped for it."""
        self.num_pages = max(0, num_pages)
        dropped = [self._drop(self._order.first()) for _ in range(len(self._pages) - self.num_pages)]
        self._free += dropped
        return dropped

    def check(self) -> None:
        """Raise AssertionError where two blocks overlap or a count is wrong; for tests."""
        assert len(self._pages) <= self.num_pages, "more pages than the store has"
        assert not self._pages.keys() & set(self._free), "a page in use is free"
        end = 0
        for stored in sorted((s for blocks in self._blocks for s in blocks.values()), key=lambda s: s.place):
            assert stored.place >= end, f"{stored} overlaps the block before"
            end = stored.place + stored.num_bytes
            page = self._pages.get(stored.place // self.page_bytes)
            assert page is not None and page.group == stored.group, f"{stored} lies in another group's page"
            slot = stored.place % self.page_bytes // stored.num_bytes
            assert page.blocks.get(slot) == stored and slot < page.num_given, f"{stored} is not known to its page"
            assert slot not in page.holes, f"{stored} lies in a place that is given again"
        assert end <= self._num_new * self.page_bytes, f"{end} bytes are outside the pages"
        salted = self._tenants.num_bytes()
        most = math.inf if self.salt_bytes is None else self.salt_bytes
        assert all(num_bytes <= most for num_bytes in salted.values()), f"{salted} are over the limit of {most}"

    def _next_slot(self, g: int, level: int) -> tuple[int, int] | None:
        """Return a page and a slot of it for a block: in a hole, in the page that is filled, or in another one; None
        where there is no page for it."""
        holed = self._holed.get((g, level)) if self._holed else None
        while holed:
            if self._is_of(holed[-1], g, level) and (holes := self._pages[holed[-1]].holes):
                return holed[-1], holes.pop()
            holed.pop()
        filled = self._open.get((g, level))
        if filled is None or not self._has_place(*filled, level):
            number = self._take_page(g, level)
            if number is None:
                return None
            filled = self._open[g, level] = number, self._pages[number]
        number, page = filled
        page.num_given += 1
        return number, page.num_given - 1

    def _is_of(self, number: int, g: int, level: int) -> bool:
        page = self._pages.get(number)
        return page is not None and page.group == g and self._order.level(number) == level

    def _has_place(self, number: int, page: _Page, level: int) -> bool:
        """Tell whether a page is in use, has its level and is not full."""
        if self._pages.get(number) is not page or (level and self._order.level(number) != level):
            return False  # only level 0 does not end
        return (page.num_given + 1) * self.block_bytes[page.group] <= self.page_bytes

    def _vacate(self, place: int) -> None:
        """Forget the block of a place, and let this be used again: with its page where that has no other block, and
        else if it is not the first one, with which lists of blocks begin a page."""
        number = place // self.page_bytes
        page = self._pages[number]
        slot = place % self.page_bytes // self.block_bytes[page.group]
        self.forget(page.blocks.pop(slot))
        if not page.blocks:
            self._free.append(self._drop(number))
        elif slot:
            page.holes.append(slot)
            self._holed.setdefault((page.group, self._order.level(number)), []).append(number)

    def _take_page(self, g: int, level: int) -> int | None:
        """Return a page without blocks; None where all have a higher priority and `OPEN_PART` gives none."""
        if len(self._pages) >= self.num_pages:
            number = self._order.first()
            if self._order.level(number) >= level:
                least = max(-(-self.num_pages // OPEN_PART), len(self.block_bytes))  # a prefix has blocks of all groups
                is_open = level >= 0 and self._order.num_up_to(level) < least
                higher = self._order.first_above(level) if is_open else None
                if higher is None and self._order.level(number) > level:
                    return None
                number = number if higher is None else higher
            self._drop(number)
        elif self._free:
            number = self._free.pop()
        else:
            number, self._num_new = self._num_new, self._num_new + 1
        self._add_page(number, g, level)
        return number

    def _add_page(self, number: int, g: int, level: int) -> _Page:
        page = self._pages[number] = _Page(g)
        self._order.add(number, level)
        return page

    def _drop(self, number: int) -> int:
        for stored in self._pages.pop(number).blocks.values():
            self.forget(stored)
        self._order.remove(number)
        return number
