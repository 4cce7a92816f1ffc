"""The states of blocks and large pages as plain data, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.pages import NO_GROUP, Association, Time


class Associations:
    """Numbers the placement states of requests, of which some belong to requests that are gone."""

    def __init__(self) -> None:
        self.all: list[Association] = []
        self._numbers: dict[int, int] = {}

    def number(self, association: Association) -> int:
        """Return the number of a placement state; each new one gets the next."""
        if id(association) not in self._numbers:
            self._numbers[id(association)] = len(self.all)
            self.all.append(association)
        return self._numbers[id(association)]


def blocks_data(allocator: BlockAllocator, associations: Associations) -> dict[str, Any]:
    """Return the order of free pages, every other page, and each group's lists in their order; counts follow from
    tables.

    Args:
        associations: numbers those of the pages, too.
    """
    pages = allocator.pages
    owned = [page for page in range(pages.num_pages) if pages.group[page] != NO_GROUP]
    owners = []
    for page in owned:
        owner = pages.owner[page]
        assert owner is not None, "a page of a group was carved for somebody"
        owners.append(associations.number(owner))
    return {
        "num_pages": pages.num_pages,
        "free": list(pages.free),
        "touched": sorted(pages.touched | pages.resting),
        "pages": [
            [page, pages.group[page], owner, list(pages.empty[page]), *pages.newest[page]]
            for page, owner in zip(owned, owners, strict=True)
        ],
        "groups": [
            {
                "evictable": [[block, *time] for block, time in group.evictable.items()],
                "protected": [[block, *time] for block, time in group.protected.items()],
                "open": list(group.open_pages),
                "stale": list(group.stale_pages),
            }
            for group in allocator.groups
        ],
    }


def associations_data(associations: Associations) -> list[Any]:
    """Return whether each is packed, and its pages with empty blocks by group."""
    return [[one.packed, [list(pages) for pages in one.open_pages]] for one in associations.all]


def load_associations(data: Sequence[Any], num_groups: int) -> list[Association]:
    """Return placement states by their number."""
    loaded = []
    for packed, open_pages in data:
        association = Association(num_groups)
        association.packed = packed
        for mine, pages in zip(association.open_pages, open_pages, strict=True):
            mine.update(dict.fromkeys(pages))
        loaded.append(association)
    return loaded


def load_blocks(
    allocator: BlockAllocator, data: dict[str, Any], associations: Sequence[Association], owners: list[Counter[int]]
) -> None:
    """Bring a fresh allocator into the state that was saved.

    Args:
        owners: how many tables hold each block, for each group.
    """
    pages = allocator.pages
    pages.free.clear()
    pages.free.extend(data["free"])
    pages.touched = set(data["touched"])
    for page, g, owner, empty, *newest in data["pages"]:
        pages.group[page], pages.owner[page], pages.empty[page] = g, associations[owner], list(empty)
        pages.newest[page] = Time(*newest)
        allocator.groups[g].num_empty += len(empty)
    for group, counts, saved in zip(allocator.groups, owners, data["groups"], strict=True):
        group.num_used = len(counts)
        for block, count in counts.items():
            group.ref_count[block] = count
            pages.num_used[block // group.blocks_per_page] += 1
        for name, blocks in (("evictable", group.evictable), ("protected", group.protected)):
            for block, *time in saved[name]:
                blocks[block] = Time(*time)
                pages.num_evictable[block // group.blocks_per_page] += 1
        for block in group.protected:
            pages.num_protected[block // group.blocks_per_page] += 1
        group.open_pages.update(dict.fromkeys(saved["open"]))
        group.stale_pages.update(dict.fromkeys(saved["stale"]))
    for page, g, *_ in data["pages"]:
        if not pages.num_used[page]:
            pages.make_idle(page)
            allocator.groups[g].num_idle += 1
            allocator.groups[g].num_protected_idle += pages.num_protected[page]
