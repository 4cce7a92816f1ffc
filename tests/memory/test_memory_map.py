"""A map of the memory says of every block what tables, counts and cache say, however it was reached."""

from __future__ import annotations

import pickle
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from memory_machine import Machine
from memory_pools import full_manager, serve, window_manager
from test_memory_machine import BUDGET_8, FULL_3, IMAGES, SPARSE, STATE, WINDOW_4
from thorough import examples

from jpaged.memory import NO_BLOCK, Block, BlockState, MemoryManager, MemoryMap, PoolLayout

TOKENS = list(range(100))


def expected_blocks(manager: MemoryManager, g: int, lengths: dict[int, int]) -> list[Block]:
    """Every block of a group, from the tables and lengths of all sequences and the allocator's lists."""
    group, spec = manager.parts.allocator.groups[g], manager.layout.groups[g].spec
    blocks = []
    for block in range(group.num_blocks):
        holders = [
            (seq_id, table.index(block))
            for seq_id, sequence in manager.parts.sequences.items()
            if block in (table := sequence.tables[g])
        ]
        cached = block in group.evictable or block in group.protected
        if manager.parts.allocator.pages.group[block // group.blocks_per_page] != g:
            blocks.append(Block(BlockState.NONE, 0, 0, 0, -1, -1, 0))
        elif holders:
            tokens = [
                policy.filled_tokens(entry, lengths.get(seq_id, sequence.num_computed), size)
                for seq_id, entry in holders
                for sequence in [manager.parts.sequences[seq_id]]
                for policy, size in [sequence.request.groups[g]]
            ]
            state = BlockState.SHARED if len(holders) > 1 else BlockState.USED
            blocks.append(Block(state, len(holders), max(tokens), 0, -1, -1, 0))
        elif cached:
            blocks.append(Block(BlockState.CACHED, 0, spec.block_size, 0, -1, -1, 0))
        else:
            blocks.append(Block(BlockState.EMPTY, 0, 0, 0, -1, -1, 0))
    return blocks


def check_map(manager: MemoryManager, seen: MemoryMap, lengths: dict[int, int]) -> None:
    """Compare a map taken now with tables, lengths, lists, cache and report."""
    assert seen.page_groups.tolist() == manager.parts.allocator.pages.group
    report = manager.report(lengths)
    for g, (shown, counted) in enumerate(zip(seen.groups, report.groups, strict=True)):
        for number, wanted in enumerate(expected_blocks(manager, g, lengths)):
            block = seen.block(g, number)
            assert block[:3] == wanted[:3], f"group {g}, block {number}"
            link = manager.parts.cache.link(g, number)
            if block.owners:
                sequence = manager.parts.sequences[block.sequence]
                assert number in sequence.tables[g] and block.request == sequence.request.request_id
                links = manager.parts.cache.chain(sequence, g).links
                assert (block.prefix != 0) == bool(links)
                if links and link is not None:
                    assert link.first == links[0].first
            elif block.state is BlockState.CACHED:
                assert block.prefix != 0 and (block.request, block.sequence) == (-1, -1)
                group = manager.parts.allocator.groups[g]
                tick = (group.evictable.get(number) or group.protected.get(number)).time
                assert block.last_need == tick <= seen.clock
            else:
                assert block == wanted
        assert (shown.used, shown.cached, shown.empty) == (counted.used, counted.evictable, counted.empty)
        real = manager.layout.groups[g].spec.real_bytes
        assert shown.used_tokens * real // shown.block_size == counted.token_bytes
    assert seen.free_pages == report.free_pages


class Watched(Machine):
    """Takes maps at some moments of a random life; each equals one computed from nothing."""

    groups = (FULL_3,)
    pool_bytes = 6 * 20
    swap_bytes = 6 * 9
    last: MemoryMap | None = None
    watched: MemoryManager | None = None
    kept: ClassVar[list] = []

    @rule(ahead=st.integers(0, 4))
    def look(self, ahead: int) -> None:
        """Sequences may be some tokens further, within their slots, than the manager was told."""
        if self.watched is not self.manager:  # a saved state went on in another pool
            self.last, self.watched = None, self.manager
        known = {seq_id: (each.num_computed, each.num_slots) for seq_id, each in self.manager.parts.sequences.items()}
        lengths = {seq_id: max(done, min(done + ahead, slots)) for seq_id, (done, slots) in known.items() if ahead}
        now = self.manager.map(lengths)
        check_map(self.manager, now, lengths)
        changes = now.changes(self.last)
        for g, group in enumerate(now.groups):
            rows = group.blocks.copy() if self.last is None else self.last.groups[g].blocks.copy()
            rows[changes.blocks[g]] = changes.records[g]
            assert rows.tolist() == group.blocks.tolist()
        for kept, blocks in self.kept:
            assert [group.blocks.tolist() for group in kept.groups] == blocks, "a map changed afterwards"
        self.kept = []
        self.last = now

    @rule()
    def keep(self) -> None:
        """A map is compared with itself of now when more has happened; its arrays are made as late as that, or now."""
        now = self.manager.map()
        blocks = [[tuple(row) for row in group.records._live.rows.tolist()] for group in now.groups]
        self.kept = [*self.kept, (now, blocks)]


class WatchedWindow(Watched):
    groups = (FULL_3, WINDOW_4)
    pool_bytes = 12 * 12
    eviction = "predicted"


class WatchedStates(Watched):
    groups = (FULL_3, STATE, SPARSE)
    pool_bytes = 210 * 8
    swap_bytes = 210


class WatchedImages(Watched):
    groups = (FULL_3, IMAGES)
    pool_bytes = 6 * 24
    image_tokens: ClassVar[dict[str | None, int]] = {None: 3, "tenant": 7}


class WatchedBudget(Watched):
    groups = (BUDGET_8,)
    pool_bytes = 4 * 20
    caching = False


COMMON = settings(
    max_examples=examples(90), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
for machine in (Watched, WatchedWindow, WatchedStates, WatchedImages, WatchedBudget):
    machine.TestCase.settings = COMMON
TestWatched = Watched.TestCase
TestWatchedWindow = WatchedWindow.TestCase
TestWatchedStates = WatchedStates.TestCase
TestWatchedImages = WatchedImages.TestCase
TestWatchedBudget = WatchedBudget.TestCase


def test_a_map_never_changes_and_the_next_one_says_what_did():
    manager = window_manager(20, window=4, prefix_caching=True)
    serve(manager, 0, TOKENS[:8])
    before = manager.map()
    kept = [group.blocks.tolist() for group in before.groups]
    serve(manager, 1, TOKENS[:8])
    after = manager.map()
    assert [group.blocks.tolist() for group in before.groups] == kept
    changed = after.changes(before)
    states = {after.block(0, int(block)).state for block in changed.blocks[0]}
    assert states == {BlockState.SHARED, BlockState.USED, BlockState.EMPTY}, "its last block is its own, in a new page"
    assert after.changes(manager.map()).count == 0
    with pytest.raises(ValueError, match="read-only"):
        after.groups[0].blocks["owners"][0] = 3


def test_a_map_that_nobody_has_read_stays_as_it_was_and_goes_to_another_process():
    manager = full_manager(40, 4, prefix_caching=True)
    serve(manager, 0, TOKENS[:40])
    maps = [manager.map()]
    wanted = [maps[0].groups[0].records._live.rows.tolist()]
    for seq_id in range(1, 6):  # the first map is overwritten by more than a quarter
        serve(manager, seq_id, [seq_id] * 20)
        maps.append(manager.map())
        wanted.append(maps[-1].groups[0].records._live.rows.tolist())
    copies = [pickle.loads(pickle.dumps(seen)) for seen in maps]
    for seen in (maps, copies):
        assert [one.groups[0].blocks.tolist() for one in seen] == wanted
    assert copies[3].groups[0].used == maps[3].groups[0].used == 25


def test_blocks_of_prompts_that_begin_alike_have_one_prefix_cached_or_not():
    manager = full_manager(30, 4, prefix_caching=True)
    assert manager.map().free_pages == 30
    for seq_id, first in enumerate((1, 1, 2)):
        serve(manager, seq_id, [first] * 8 + [10 + seq_id] * 8)
    manager.free(1)
    blocks = [manager.map().block(0, block) for block in range(12)]
    by_state = {state: {b.prefix for b in blocks if b.state is state} for state in BlockState}
    cached = by_state[BlockState.CACHED]
    assert len(cached) == 1 and len(by_state[BlockState.USED]) == 2
    assert cached < by_state[BlockState.USED]


def test_last_needs_are_in_the_order_of_eviction():
    manager = full_manager(20, 4, prefix_caching=True)
    for seq_id in range(3):
        serve(manager, seq_id, [seq_id] * 4)
    manager.map()
    for seq_id in (1, 0, 2):
        manager.free(seq_id)
    seen = manager.map()
    order = [seen.block(0, block).last_need for block in manager.parts.allocator.groups[0].evictable]
    assert order == sorted(order) and len(set(order)) == 3 and order[-1] <= seen.clock


def test_a_map_after_everything_was_forgotten_begins_anew():
    manager = full_manager(10, 4)
    serve(manager, 0, TOKENS[:8])
    before = manager.map()
    manager.clear()
    after = manager.map()
    assert after.free_pages == 10 and after.groups[0].used == 0
    assert len(after.changes(before).pages) == 2


def test_nothing_is_noted_before_somebody_asks_for_a_map():
    manager = full_manager(10, 4)
    serve(manager, 0, TOKENS[:8])
    assert manager.parts.allocator.groups[0].changed is None and manager.parts.allocator.pages.changed is None


def test_maps_of_other_pools_and_blocks_that_are_not_there_are_refused():
    small, large = full_manager(10).map(), full_manager(11).map()
    with pytest.raises(ValueError, match=r"before has 10 large pages .* not 11"):
        large.changes(small)
    with pytest.raises(IndexError, match=r"block=10 is outside \[0, 10\)"):
        small.block(0, 10)
    with pytest.raises(IndexError, match=r"page=-1 is outside \[0, 10\)"):
        small.page(-1)
    assert small.page(3) == [], "a free page has no blocks"
    with pytest.raises(ValueError, match="columns"):
        small.to_svg(columns=-1)
    with pytest.raises(ValueError, match="cell"):
        small.to_png(cell=1000)


def test_the_table_of_entries_tells_released_ones_apart():
    """A windowed group's table has holes, which no block of the map stands for."""
    manager = window_manager(20, window=2)
    serve(manager, 0, TOKENS[:12])
    table = manager.block_table(0, 1)
    assert NO_BLOCK in table
    owned = [b for b in range(len(manager.map().groups[1].blocks)) if manager.map().block(1, b).owners]
    assert owned == sorted(block for block in table if block != NO_BLOCK)


def drawn_map() -> MemoryMap:
    manager = window_manager(20, window=4, prefix_caching=True)
    serve(manager, 7, TOKENS[:8])
    manager.fork(7, 8)
    return manager.map()


def test_the_svg_has_a_cell_a_page_with_what_it_holds():
    seen = drawn_map()
    root = ElementTree.fromstring(seen.to_svg())
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 20
    assert titles[0] == "page 0, full: 2 shared; requests 7"
    assert titles[-1] == "page 19: free"


def test_the_png_has_the_colours_of_groups_and_states():
    seen = drawn_map()
    data = seen.to_png(columns=5, cell=7)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (35, 28)
    (length,) = struct.unpack(">I", data[33:37])
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(height, 1 + 4 * width)
    pixels = lines[:, 1:].reshape(height, width, 4)
    assert pixels[0, 0].tolist() == [0x00, 0x72, 0xB2, 255], "page 0 is full attention's, shared"
    assert pixels[27, 34].tolist() == [0, 0, 0, 0], "a gap between cells"
    assert pixels[22, 29].tolist()[3] == round(255 * 0.12), "the last page is free"


def test_the_png_of_a_model_that_keeps_nothing_is_an_image_too():
    data = MemoryManager(PoolLayout.plan((), 0)).map().to_png()
    assert struct.unpack(">II", data[16:24]) == (24, 24)


@pytest.mark.parametrize("pages", [20, 3000])
def test_a_notebook_shows_drawing_and_counts_without_anything_from_outside(pages):
    manager = window_manager(pages, window=4)
    serve(manager, 0, TOKENS[:8])
    shown = manager.map()._repr_html_()
    ElementTree.fromstring(shown.replace("&#9632;", "x"))
    assert "<td>4</td>" in shown and f"{pages} large pages" in shown
    assert "<script" not in shown and "http" not in shown.replace("http://www.w3.org/2000/svg", "")
