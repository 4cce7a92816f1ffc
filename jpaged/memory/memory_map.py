"""Every large page and block of the pool at one moment, as a value.

`MapTracker` takes a `MemoryMap` between two steps. Its arrays are read-only and never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from jpaged.memory import map_drawing
from jpaged.memory.block_records import ROW, Block, BlockState, GroupMap
from jpaged.memory.versioned_array import Indices, Rows
from jpaged.validation import integer


@dataclass(frozen=True, eq=False)
class MapChanges:
    """Differences between two maps of one pool.

    Attributes:
        pages: ascending numbers of the large pages that belong to another group than before.
        blocks: for each group, ascending numbers of the blocks whose record is another.
        records: their records in the later map.
    """

    pages: Indices
    blocks: tuple[Indices, ...]
    records: tuple[Rows, ...]

    @property
    def count(self) -> int:
        """Return how many pages and blocks differ."""
        return len(self.pages) + sum(map(len, self.blocks))


@dataclass(frozen=True, eq=False)
class MemoryMap:
    """Every large page and block of one pool; ``str()`` is a line a group, and a notebook draws it.

    Attributes:
        page_bytes: bytes of a large page on one device.
        page_groups: for each large page, the number of its group, -1 where it is free.
        groups: the blocks of each layer group.
        clock: the memory's logical clock, on which `Block.last_need` lies; it grows whenever blocks are released.
        request_names: the clients' names of the requests of `Block.request`, where they gave them any.
        identity: tells the map from others of its pool.
        since: `identity` of the map that was taken before.
        newest: the differences from that one; None = not known.
    """

    page_bytes: int
    page_groups: npt.NDArray[np.int32]
    groups: tuple[GroupMap, ...]
    clock: int
    request_names: Mapping[int, str] = field(default_factory=dict)
    identity: object = field(default=None, repr=False)
    since: object = field(default=None, repr=False)
    newest: MapChanges | None = field(default=None, repr=False)

    @property
    def num_pages(self) -> int:
        """Return the number of large pages."""
        return len(self.page_groups)

    @property
    def free_pages(self) -> int:
        """Return how many large pages belong to no group."""
        return int((self.page_groups < 0).sum())

    def block(self, group: int, block: int) -> Block:
        """Return one block.

        Raises:
            IndexError: there is no such group or block.
        """
        rows = self.groups[group].blocks
        if not 0 <= block < len(rows):
            raise IndexError(f"block={block} is outside [0, {len(rows)}) in group {group}")
        state, *values = rows[block].item()
        return Block(BlockState(state), *values)

    def page(self, page: int) -> list[Block]:
        """Return the blocks of a large page; a free one has none.

        Raises:
            IndexError: there is no such page.
        """
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page={page} is outside [0, {self.num_pages})")
        g = int(self.page_groups[page])
        if g < 0:
            return []
        first = page * self.groups[g].blocks_per_page
        return [self.block(g, first + i) for i in range(self.groups[g].blocks_per_page)]

    def changes(self, before: MemoryMap | None) -> MapChanges:
        """Return the differences from an earlier map of the same pool; None stands for an empty pool.

        Raises:
            ValueError: the other map is of another pool.
        """
        if before is not None and self.newest is not None and before.identity is self.since is not None:
            return self.newest
        if before is None:
            return self._changes(self.page_groups >= 0, [np.flatnonzero(g.blocks["state"]) for g in self.groups])
        shapes = [[(group.name, group.num_blocks) for group in one.groups] for one in (before, self)]
        if before.num_pages != self.num_pages or shapes[0] != shapes[1]:
            raise ValueError(
                f"before has {before.num_pages} large pages and the groups {shapes[0]}, not {self.num_pages} and "
                f"{shapes[1]}"
            )
        pairs = zip(before.groups, self.groups, strict=True)
        return self._changes(before.page_groups != self.page_groups, [_different(old, new) for old, new in pairs])

    def _changes(self, pages: npt.NDArray[np.bool_], blocks: list[Indices]) -> MapChanges:
        records = tuple(group.blocks[at] for group, at in zip(self.groups, blocks, strict=True))
        return MapChanges(np.flatnonzero(pages), tuple(blocks), records)

    def named(self, names: Mapping[int, str]) -> MemoryMap:
        """Return the same map with the names of requests that clients know."""
        return replace(self, request_names=dict(names))

    def __str__(self) -> str:
        lines = [f"{self.num_pages} large pages of {self.page_bytes:,} bytes, {self.free_pages} free"]
        for group in self.groups:
            lines.append(
                f"{group.name}: {group.used} used ({group.shared} shared, {group.used_tokens} tokens), {group.cached} "
                f"cached, {group.empty} empty"
            )
        return "\n".join(lines)

    def to_svg(self, *, columns: int = 0) -> str:
        """Return the map as an SVG image: a cell a large page, its blocks in it; tooltips name a cell's content.

        Args:
            columns: cells in a row; 0 = three times as many as rows.
        """
        columns = integer("columns", columns, low=0)
        return map_drawing.svg(self.page_groups, self.groups, columns)

    def to_png(self, *, columns: int = 0, cell: int = 0) -> bytes:
        """Return the map as a PNG image on a transparent ground.

        Args:
            columns: cells in a row; 0 = three times as many as rows.
            cell: pixels of a cell's side, at most 256; 0 = so many that all are about 900 pixels wide.
        """
        columns, cell = integer("columns", columns, low=0), integer("cell", cell, low=0, high=256)
        return map_drawing.png(self.page_groups, self.groups, columns, cell)

    def to_html(self) -> str:
        """Return the map as a piece of HTML that needs nothing else: a legend, the drawing and a table of counts."""
        return map_drawing.html(self.page_groups, self.groups, str(self).splitlines()[0])

    def _repr_html_(self) -> str:
        return self.to_html()


def _different(old: GroupMap, new: GroupMap) -> Indices:
    """Return the numbers of the blocks that differ."""
    if old.records is new.records:
        return np.empty(0, np.int64)
    words = ROW.itemsize // 8
    differs = old.blocks.view(np.int64).reshape(-1, words) != new.blocks.view(np.int64).reshape(-1, words)
    return np.flatnonzero(differs.any(axis=1))
