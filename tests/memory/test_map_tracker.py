"""The allocator notes every block and page that it changes, and the tracker what tables and progress say of others."""

from __future__ import annotations

import random

import pytest
from memory_pools import full_manager, serve

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.map_tracker import differences

TOKENS = list(range(100))


def states(allocator: BlockAllocator) -> tuple[list[list[object]], list[int]]:
    """Return what a map says of each block, and each page's group."""
    pages = allocator.pages
    blocks = [
        [
            (
                group.ref_count[b],
                group.evictable.get(b),
                group.protected.get(b),
                pages.group[b // group.blocks_per_page] == g,
            )
            for b in range(group.num_blocks)
        ]
        for g, group in enumerate(allocator.groups)
    ]
    return blocks, list(pages.group)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_an_operation_changes_is_noted(seed):
    rng = random.Random(seed)
    allocator = BlockAllocator([2, 3], 6, lambda g, block: None)
    noted = [set(), set()]
    for group, blocks in zip(allocator.groups, noted, strict=True):
        group.changed = blocks
    pages = allocator.pages.changed = set()
    requests = [allocator.new_request() for _ in range(2)]
    owned: list[tuple[int, int]] = []
    done = set()
    for tick in range(600):
        before, groups_before = states(allocator)
        g, what = rng.randrange(2), rng.choice(["take", "take", "share", "release", "release", "unprotect", "discard"])
        group = allocator.groups[g]
        cached = [*group.evictable, *group.protected]
        if what == "take" and (taken := allocator.take([1 - g, g], requests[tick % 2])) is not None:
            owned += [(h, block) for h, blocks in enumerate(taken) for block in blocks]
        elif what == "share" and (choices := [*cached, *(b for h, b in owned if h == g)]):
            block = rng.choice(choices)
            allocator.share(g, block)
            owned.append((g, block))
        elif what == "release" and owned:
            h, block = owned.pop(rng.randrange(len(owned)))
            allocator.release(h, block, EvictionKey(tick, 0), keep=rng.random() < 0.8, protect=rng.random() < 0.3)
        elif what == "unprotect" and group.protected:
            allocator.requeue(g, next(iter(group.protected)), EvictionKey(tick, 0))
        elif what == "discard" and cached:
            allocator.discard(g, rng.choice(cached))
        else:
            continue
        done.add(what)
        after, groups_after = states(allocator)
        changed = [
            {b for b, state in enumerate(now) if state != old[b]} for old, now in zip(before, after, strict=True)
        ]
        for h, blocks in enumerate(changed):
            size = allocator.groups[h].blocks_per_page
            assert {b for b in blocks if b // size not in pages} <= noted[h], f"{what} in group {g}"
        assert {p for p, h in enumerate(groups_after) if h != groups_before[p]} <= pages
        for seen in (*noted, pages):
            seen.clear()
    assert done == {"take", "share", "release", "unprotect", "discard"}


def test_the_tokens_of_a_shared_block_are_those_of_the_owner_that_is_furthest():
    manager = full_manager(20, 4)
    manager.add(0, 0)
    manager.allocate(0, 12, first_write=0)
    manager.commit(0, TOKENS, 9)
    manager.fork(0, 1)
    last = manager.block_table(0, 0)[2]
    assert manager.map().block(0, last)[:3] == (4, 2, 1)
    manager.commit(0, TOKENS, 11)
    assert manager.map().block(0, last).tokens == 3
    manager.free(0)
    assert manager.map().block(0, last)[:3] == (3, 1, 1), "the other is not as far"


def test_tokens_that_the_manager_was_not_told_of_yet_are_in_the_map_if_the_caller_knows_them():
    manager = full_manager(20, 4)
    manager.add(0, 0)
    manager.allocate(0, 12, first_write=0)
    manager.commit(0, TOKENS, 9)
    last = manager.block_table(0, 0)[2]
    seen = [manager.map(lengths) for lengths in ({}, {0: 10}, {0: 11}, {7: 3})]
    assert [one.block(0, last).tokens for one in seen] == [1, 2, 3, 1]
    assert seen[2].changes(seen[1]).blocks[0].tolist() == [last]
    assert seen[2].groups[0].used_tokens == 11
    manager.commit(0, TOKENS, 11)
    assert manager.map({0: 11}).changes(manager.map({0: 11})).count == 0


def test_the_owner_that_a_shared_block_names_is_one_that_has_it():
    manager = full_manager(20, 4)
    serve(manager, 7, TOKENS[:8])
    for child in (8, 9):
        manager.fork(7, child)
    block = manager.block_table(7, 0)[0]
    assert manager.map().block(0, block)[4:6] == (7, 7)
    manager.free(7)
    assert manager.map().block(0, block).sequence == 8
    manager.free(8)
    seen = manager.map().block(0, block)
    assert (seen.sequence, seen.request, seen.owners) == (9, 7, 1)


def test_a_prefix_that_becomes_known_later_is_that_of_all_blocks():
    manager = full_manager(20, 4, prefix_caching=True)
    manager.add(0, 0)
    manager.allocate(0, 6, first_write=0)
    manager.commit(0, TOKENS[:3], 6)  # the host has not seen all of the first block
    assert [manager.map().block(0, b).prefix for b in manager.block_table(0, 0)] == [0, 0]
    manager.commit(0, TOKENS[:6], 6)
    prefixes = {manager.map().block(0, b).prefix for b in manager.block_table(0, 0)}
    assert len(prefixes) == 1 and 0 not in prefixes


def test_a_map_that_was_interrupted_leaves_the_next_one_right(monkeypatch):
    manager = full_manager(20, 4)
    serve(manager, 0, TOKENS[:8])
    manager.map()
    serve(manager, 1, TOKENS[50:60])
    tracker = manager._tracker
    monkeypatch.setattr(tracker._groups[0], "take", lambda *arguments: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        manager.map()
    seen = manager.map()
    assert manager._tracker is not tracker
    assert (seen.groups[0].used, seen.groups[0].used_tokens) == (5, 18)


@pytest.mark.parametrize(
    ("old", "new", "entries"),
    [
        ([], [], []),
        ([1, 2, 3], [1, 2, 3, 4], [3]),
        ([1, 2, 3], [1, 9], [1, 2]),
        (list(range(200)), [*range(70), -1, *range(71, 201)], [70, 200]),
    ],
)
def test_only_entries_that_differ_are_looked_at(old, new, entries):
    assert list(differences(old, new)) == entries
