"""Recomputes from scratch, for tests, all that must hold between tables, counts and pages at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import NO_BLOCK, BlockTables
from jpaged.memory.pages import NO_GROUP
from jpaged.memory.prefix_cache import PrefixCache
from jpaged.memory.shared_blocks import SharedBlocks


def check(
    allocator: BlockAllocator, cache: PrefixCache, tables: Iterable[BlockTables], shared: Iterable[SharedBlocks]
) -> None:
    """Compare all state with the block tables, and with the holds on images and adapters. O(pool).

    Raises:
        AssertionError: a count is wrong; the message names the group, page or block.
    """
    owners = [Counter[int]() for _ in allocator.groups]
    for sequence in tables:
        for g, table in enumerate(sequence.tables):
            owners[g].update(block for block in table if block != NO_BLOCK)
    known: dict[int, PrefixCache | SharedBlocks] = dict.fromkeys(range(len(owners)), cache)
    for whole in shared:
        owners[whole.group], known[whole.group] = whole.owners(), whole
    for g, counts in enumerate(owners):
        _check_group(g, allocator, known[g], counts)
    _check_pages(allocator)


def _check_group(g: int, allocator: BlockAllocator, cache: PrefixCache | SharedBlocks, owners: Counter[int]) -> None:
    group, pages = allocator.groups[g], allocator.pages
    for block in owners:
        assert 0 <= block < group.num_blocks, f"group {g}: block {block} is out of range"
    for block, count in enumerate(group.ref_count):
        assert count == owners[block], f"group {g}: block {block} counts {count}, {owners[block]} own it"
        page = block // group.blocks_per_page
        cached = (block in group.evictable) + (block in group.protected)
        states = (count > 0) + cached + (pages.group[page] == g and block in pages.empty[page])
        expected = 1 if pages.group[page] == g else 0
        assert states == expected, f"group {g}: block {block} is in {states} states, not {expected}"
        if cache.holds(g, block):
            assert count or cached, f"group {g}: empty block {block} is still cached"
    cache.check(g)
    for blocks in (group.evictable, group.protected):
        for block in blocks:
            assert cache.holds(g, block), f"group {g}: evictable block {block} is not cached"
        assert list(blocks.values()) == sorted(blocks.values()), f"group {g}: evictable blocks are out of order"
    mine = [page for page in range(pages.num_pages) if pages.group[page] == g]
    assert group.num_used == len(owners), f"group {g}: num_used"
    assert group.num_empty == sum(len(pages.empty[page]) for page in mine), f"group {g}: num_empty"
    assert group.num_idle == sum(pages.is_idle[page] for page in mine), f"group {g}: num_idle"
    in_idle = sum(bool(pages.is_idle[block // group.blocks_per_page]) for block in group.protected)
    assert group.num_protected_idle == in_idle, f"group {g}: protected blocks in idle pages"
    total = group.num_used + len(group.evictable) + len(group.protected) + group.num_empty
    assert total == len(mine) * group.blocks_per_page, f"group {g}: used + evictable + empty is not all"
    is_open = {page for page in mine if pages.num_used[page] and pages.empty[page]}
    assert set(group.open_pages) == is_open, f"group {g}: open pages"
    is_stale = {page for page in mine if pages.num_used[page] and pages.num_evictable[page]}
    assert set(group.stale_pages) == is_stale, f"group {g}: stale pages"


def _check_pages(allocator: BlockAllocator) -> None:
    pages = allocator.pages
    free = set(pages.free)
    assert len(free) == len(pages.free), "a large page is free twice"
    for page in range(pages.num_pages):
        g = pages.group[page]
        assert (g == NO_GROUP) == (page in free), f"page {page} is free and owned, or neither"
        if g == NO_GROUP:
            assert not pages.is_idle[page], f"page {page} is free and idle"
            assert not pages.empty[page] and pages.owner[page] is None, f"page {page} was not given back"
            continue
        group, owner = allocator.groups[g], pages.owner[page]
        first = page * group.blocks_per_page
        blocks = range(first, first + group.blocks_per_page)
        used = sum(group.ref_count[block] > 0 for block in blocks)
        protected = [group.protected[block] for block in blocks if block in group.protected]
        evictable = [group.evictable[block] for block in blocks if block in group.evictable] + protected
        assert pages.num_protected[page] == len(protected), f"page {page}: protected"
        assert pages.num_used[page] == used, f"page {page}: used"
        assert pages.num_evictable[page] == len(evictable), f"page {page}: evictable"
        assert used or evictable, f"page {page} is all empty but was not given back"
        assert bool(pages.is_idle[page]) == (used == 0), f"page {page}: idle"
        if not used:
            assert pages.newest[page] == max(evictable), f"page {page}: time is not that of its newest block"
        assert owner is not None, f"page {page} has no owner"
        assert (page in owner.by_group[g]) == bool(pages.empty[page]), f"page {page}: open pages of its owner"
    assert pages.num_idle == sum(pages.is_idle), "number of idle pages"
    guarded = sum(pages.is_guarded(page) for page in range(pages.num_pages) if pages.is_idle[page])
    assert pages.num_guarded == guarded, "number of guarded pages"
    idle = [pages.newest[page] for page in range(pages.num_pages) if pages.is_idle[page]]
    oldest = pages.oldest_idle()
    assert (oldest is None) == (not idle), "the oldest idle page is lost"
    assert oldest is None or pages.newest[oldest] == min(idle), "the oldest idle page is not the oldest"
