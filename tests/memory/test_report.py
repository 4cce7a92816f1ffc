"""The report counts blocks by state, tokens once, and what sharing saves."""

from __future__ import annotations

from memory_pools import full_manager, serve, window_manager

from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout

TOKENS = list(range(100))


def test_an_empty_pool_wastes_nothing():
    report = full_manager(20).report()
    assert report.free_pages == report.num_pages == 20
    assert (report.groups[0].used, report.groups[0].waste, report.groups[0].saving) == (0, 0, 0)


def test_waste_is_the_unfilled_part_of_the_last_block():
    manager = full_manager(20, 4)
    serve(manager, 0, TOKENS[:10])
    group = manager.report().groups[0]
    assert group.reserved_bytes == 3 * 8
    assert group.token_bytes == 10 * 2
    assert group.waste == 1 - 10 / 12


def test_shared_tokens_are_counted_once_and_the_saving_is_reported():
    manager = full_manager(20, 4)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    manager.allocate(1, 11, first_write=10)
    manager.commit(1, TOKENS[:11], 11)
    group = manager.report().groups[0]
    assert (group.used, group.table_entries, group.blocks_saved) == (4, 6, 2)
    assert group.saving == 2 / 6
    assert group.token_bytes == (8 + 2 + 3) * 2


def test_the_caller_may_know_better_lengths_than_the_last_commit():
    manager = full_manager(20, 4)
    serve(manager, 0, TOKENS[:10])
    assert manager.report({0: 12}).groups[0].waste == 0


def test_cached_blocks_are_not_reserved_and_empty_ones_in_a_groups_page_are():
    manager = window_manager(10, window=4, prefix_caching=True)
    serve(manager, 0, TOKENS[:8])
    full, window = manager.report().groups
    assert (full.used, full.evictable, full.empty) == (4, 0, 0)
    assert (window.used, window.evictable, window.empty) == (2, 2, 2)
    assert window.reserved_bytes == 4 * 2
    report = manager.report()
    assert report.stranded_bytes == 2 * 2
    assert "stranded in empty blocks, which only their group can take: 4 B, 6.7%" in str(report)
    manager.free(0)
    report = manager.report()
    assert report.idle_pages + report.free_pages == report.num_pages


def test_phantom_layers_show_as_padding():
    specs = [
        GroupSpec("a", layer_bytes=8, num_layers=7, block_size=4, policy=FullAttention()),
        GroupSpec("b", layer_bytes=8, num_layers=4, block_size=4, policy=FullAttention()),
    ]
    manager = MemoryManager(PoolLayout.plan(specs, 640, max_page_bytes=64))
    serve(manager, 0, TOKENS[:4])
    padded = manager.report().groups[0]
    assert padded.padding_bytes == 8
    assert padded.waste == padded.padding == 1 / 8
    assert "blocks are padded, to keep large pages small: a 12.5%" in str(manager.report())


def test_the_table_is_aligned():
    manager = window_manager(10)
    serve(manager, 0, TOKENS[:8])
    lines = str(manager.report()).splitlines()
    assert lines[0].split()[:4] == ["group", "used", "evictable", "empty"]
    assert [line.split()[0] for line in lines[1:3]] == ["full", "window"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[3] == "pool of 60 B, 10 large pages of 6 B: 6 free, 0 only cached; sharing saves 0.0% of the blocks"
