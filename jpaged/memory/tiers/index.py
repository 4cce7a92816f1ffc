"""Maps content to its place in a tier, within a bound; the least recently needed pages are dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from jpaged.memory.hash_chain import Link


class StoredBlock(NamedTuple):
    """A block in a tier.

    Attributes:
        digest, tokens: see `Link`.
        place: offset in the store, in bytes.
    """

    group: int
    digest: bytes
    tokens: bytes
    place: int
    num_bytes: int


class _Page(NamedTuple):
    """A large page in use: its layer group and the blocks that were put into it, in order."""

    group: int
    blocks: list[StoredBlock]


class TierIndex:
    """Maps content to its place in a store that is cut as the pool is: into large pages, each with blocks of one group.

    A page is filled from its beginning. When none is free, the one that was written or read least recently is
    dropped whole, so that blocks of all sizes share the store and no gap stays.

    Args:
        block_bytes: size of a block, for each group; each divides `page_bytes`.
        page_bytes: size of a large page.
        num_pages: large pages that the store has.
    """

    def __init__(self, block_bytes: Sequence[int], page_bytes: int, num_pages: int) -> None:
        self.block_bytes = block_bytes
        self.page_bytes = page_bytes
        self.num_pages = num_pages
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._blocks: list[dict[bytes, StoredBlock]] = [{} for _ in self.block_bytes]
        self._pages: OrderedDict[int, _Page] = OrderedDict()  # the least recently needed first
        self._open: list[int | None] = [None] * len(self.block_bytes)
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

    def find(self, g: int, link: Link) -> StoredBlock | None:
        """Return the block of group `g` with this content, or None; the tokens are compared too, not only the
        digest."""
        stored = self._blocks[g].get(link.digest)
        return stored if stored is not None and stored.tokens == link.tokens else None

    def readable(self, g: int, link: Link) -> StoredBlock | None:
        """Return the block if a read that begins now finds it: the store writes and reads in order."""
        return None if (g, link.digest) in self._unsent else self.find(g, link)

    def place(self, g: int, link: Link) -> int | None:
        """Return where a block lies; None = it cannot be found."""
        stored = self.find(g, link)
        return None if stored is None else stored.place

    def touch(self, stored: StoredBlock) -> None:
        """Note that a block that can be found is needed now."""
        self._pages.move_to_end(stored.place // self.page_bytes)

    def put(self, g: int, link: Link) -> StoredBlock | None:
        """Give content a place, for which others may be forgotten; None where there is none, or the digest has one. A
        read finds it after `sent`."""
        if link.digest in self._blocks[g] or not self.num_pages:
            return None
        number = self._open[g]
        if number is None:
            number = self._open[g] = self._take_page(g)
        page, size = self._pages[number], self.block_bytes[g]
        place = number * self.page_bytes + len(page.blocks) * size
        stored = StoredBlock(g, link.digest, link.tokens, place, size)
        page.blocks.append(stored)
        if (len(page.blocks) + 1) * size > self.page_bytes:
            self._open[g] = None
        self._blocks[g][link.digest] = stored
        self._unsent.add((g, link.digest))
        self._pages.move_to_end(number)
        return stored

    def sent(self) -> None:
        """Note that all blocks with a place are on disk, or on their way there."""
        self._unsent.clear()

    def forget(self, stored: StoredBlock) -> None:
        """Hide a damaged or dropped block; its place is reclaimed with its page."""
        if self._blocks[stored.group].get(stored.digest) == stored:
            del self._blocks[stored.group][stored.digest]

    def forget_unsent(self) -> None:
        """Forget the blocks whose bytes will not come, because the step that was to send them is given up."""
        for g, digest in self._unsent:
            self._blocks[g].pop(digest, None)
        self._unsent.clear()

    def limit(self, num_pages: int) -> list[int]:
        """Set how many pages may be in use; return the numbers of those that are dropped for it."""
        self.num_pages = max(0, num_pages)
        dropped = [self._drop_oldest() for _ in range(len(self._pages) - self.num_pages)]
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
            assert stored in page.blocks, f"{stored} is not known to its page"
        assert end <= self._num_new * self.page_bytes, f"{end} bytes are outside the pages"
        for g, number in enumerate(self._open):
            assert number is None or self._pages[number].group == g, f"group {g} fills another's page"

    def _take_page(self, g: int) -> int:
        if len(self._pages) >= self.num_pages:
            number = self._drop_oldest()
        elif self._free:
            number = self._free.pop()
        else:
            number, self._num_new = self._num_new, self._num_new + 1
        self._pages[number] = _Page(g, [])
        return number

    def _drop_oldest(self) -> int:
        number, page = self._pages.popitem(last=False)
        for stored in page.blocks:
            self.forget(stored)
        if self._open[page.group] == number:
            self._open[page.group] = None
        return number
