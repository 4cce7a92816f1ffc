"""Moves a saved memory into a pool of another size: drops cached pages first, then whole requests that the caller
names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jpaged.memory.block_tables import NO_BLOCK
from jpaged.memory.manager import MemoryManager
from jpaged.memory.policies import StateCheckpoints
from jpaged.memory.saving.saved_memory import load_memory, memory_data, shared_by_name, shared_of


class Fitting:
    """Holds a saved memory in a trial pool of its old size, and drops from it until the rest fits the new pool.

    Args:
        memory: the memory of the new pool, whose layer groups and block sizes are those of the saved one. It does not
            change before `apply`.
        data: the result of `memory_data`.
    """

    def __init__(self, memory: MemoryManager, data: Mapping[str, Any]) -> None:
        self._memory = memory
        self._old_pages = data["blocks"]["num_pages"]
        self._trial = _of_pages(memory, self._old_pages)
        load_memory(self._trial, data)

    def give_up(self, seq_ids: Iterable[int]) -> None:
        """Free sequences, in the pool or in host memory; ids without tables are ignored."""
        for seq_id in seq_ids:
            if self._trial.holds(seq_id):
                self._trial.free(seq_id)

    def keeps_more(self, request_id: int) -> bool:
        """Tell whether a request keeps more states than it would have chosen in the new pool, whose steps have no room
        for their ends."""
        request = self._trial.parts.requests.get(request_id)
        if request is None:
            return False
        pairs = zip(request.groups, self._memory.parts.groups, strict=True)
        return any(
            isinstance(mine, StateCheckpoints)
            and isinstance(here, StateCheckpoints)
            and mine.most_kept > here.most_kept
            for (mine, _), (here, _) in pairs
        )

    def fits_pool(self) -> bool:
        """Forget cached pages, the least recently needed first, until the rest fits; return False if it never does."""
        pages = self._trial.parts.allocator.pages
        while self._old_pages - len(pages.free) > self._memory.layout.num_pages:
            if not self._trial.evict_idle_page():
                return False
        return True

    def fits_host(self) -> bool:
        """Tell whether the swapped sequences fit the host memory that the new engine has for them."""
        return self._trial.swap_space.host.used_bytes <= self._memory.swap_space.host.limit_bytes

    def apply(self) -> dict[int, int]:
        """Bring the memory of the new pool into the state; return where each large page that holds something lies now.

        The pages lie where they lay, as far as the new pool has these places.
        """
        data, there = memory_data(self._trial), self._memory.layout.num_pages
        owned = [page for page, *_ in data["blocks"]["pages"]]
        moved = {page: page for page in owned if page < there}
        places = (page for page in data["blocks"]["free"] if page < there)
        moved |= zip((page for page in owned if page >= there), places, strict=False)
        load_memory(self._memory, _moved(data, moved, there, [g.blocks_per_page for g in self._memory.layout.groups]))
        return moved


def _of_pages(memory: MemoryManager, num_pages: int) -> MemoryManager:
    """Return an empty memory with the settings of another, on a pool of so many large pages."""
    layout = memory.layout
    groups = tuple(replace(group, num_blocks=num_pages * group.blocks_per_page) for group in layout.groups)
    layout = replace(layout, groups=groups, num_pages=num_pages)
    return memory.empty_copy(layout, swap_space_bytes=layout.pool_bytes)


def _moved(data: dict[str, Any], pages: Mapping[int, int], num_pages: int, sizes: list[int]) -> dict[str, Any]:
    """Return the data of a memory whose pages lie in other places.

    Args:
        pages: the new place of each page that holds something.
        sizes: blocks of each group in a page.
    """

    def block(g: int, old: int) -> int:
        return NO_BLOCK if old == NO_BLOCK else pages[old // sizes[g]] * sizes[g] + old % sizes[g]

    def listed(g: int, blocks: list[list[int]]) -> list[list[int]]:
        return [[block(g, old), *rest] for old, *rest in blocks]

    saved, taken = data["blocks"], set(pages.values())
    free = [page for page in saved["free"] if page < num_pages and page not in taken]
    free += sorted(set(range(num_pages)) - taken - set(free))
    blocks = {
        "num_pages": num_pages,
        "free": free,
        "touched": sorted(pages[page] for page in saved["touched"] if page in pages),
        "pages": [
            [pages[page], g, owner, [block(g, one) for one in empty], *newest]
            for page, g, owner, empty, *newest in saved["pages"]
        ],
        "groups": [
            {
                "evictable": listed(g, group["evictable"]),
                "protected": listed(g, group["protected"]),
                "open": [pages[page] for page in group["open"]],
                "stale": [pages[page] for page in group["stale"]],
            }
            for g, group in enumerate(saved["groups"])
        ],
    }
    sequences = {
        seq_id: {**one, "tables": [[block(g, old) for old in table] for g, table in enumerate(one["tables"])]}
        for seq_id, one in data["sequences"].items()
    }
    open_pages = [
        [packed, [[pages[page] for page in mine if page in pages] for mine in opened]]
        for packed, opened in data["associations"]
    ]
    cached = [listed(g, contents) for g, contents in enumerate(data["cached"])]

    def moved(held: dict[str, Any]) -> dict[str, Any]:
        g, stored = held["group"], held["stored"]
        return {
            **held,
            "stored": [[name, n, [block(g, old) for old in blocks], *rest] for name, n, blocks, *rest in stored],
        }

    return {
        **data,
        "blocks": blocks,
        "sequences": sequences,
        "associations": open_pages,
        "cached": cached,
        **shared_by_name({kind: moved(held) for kind, held in shared_of(data).items()}),
    }
