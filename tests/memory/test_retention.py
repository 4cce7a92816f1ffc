"""Priorities that requests give to their tokens: the order of eviction, how long they last, and saved states."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pools import full_manager, run, window_manager
from thorough import examples

from jpaged.cache_retention import DEFAULT_PRIORITY, read_retention
from jpaged.memory.retention import Retention
from jpaged.memory.saving import memory_data
from jpaged.memory.saving.saved_memory import load_memory
from jpaged.memory.tiers.page_order import PageOrder


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def priority(value: int, *, start: int = 0, end: int | None = None, seconds: float | None = None):
    return read_retention([{"start": start, "end": end, "priority": value, "duration": seconds}], None)


def cached(manager, seq_id: int, tokens: list[int], retention=None, **match_options) -> int:
    """Compute a prompt and leave it in the cache; return how much of it was there."""
    manager.add(seq_id, seq_id, retention=retention)
    hit = manager.match_prefix(seq_id, tokens, **match_options)
    run(manager, seq_id, tokens, hit)
    manager.free(seq_id)
    manager.check_invariants()
    return hit


def found(manager, tokens: list[int], **options) -> int:
    return manager.cached_prefix([*tokens, -1], **options)


def test_ends_that_move_on_take_no_more_room_than_contents_and_come_in_order():
    clock, names = Clock(), [b"%d" % number for number in range(8)]
    retention = Retention(2, clock)
    order = PageOrder()
    for number in range(8):
        order.add(number, 5)
    tracemalloc.start()
    for clock.now in range(2000):
        for number, name in enumerate(names):
            retention.note(number % 2, name, 10, 100.0 + number)
            order.extend(number, clock.now + 100.0 + number)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 100_000, "an entry of each time would be 32,000 of them"
    for clock.now in range(2098, 2110):
        order.end_levels(clock.now)
        ended = [name for number, name in enumerate(names) if 1999 + 100 + number == clock.now]
        assert [name for _, name in retention.take_ended()] == ended
        assert [order.level(number) for number in range(8)] == [5 * (2099 + number > clock.now) for number in range(8)]


def test_blocks_of_a_higher_priority_stay_although_they_were_needed_before():
    manager = full_manager(8, prefix_caching=True)
    cached(manager, 0, [1] * 12, priority(80))
    cached(manager, 1, [2] * 12)
    cached(manager, 2, [3] * 12)
    assert (found(manager, [1] * 12), found(manager, [2] * 12), found(manager, [3] * 12)) == (12, 8, 12)


def test_blocks_of_a_lower_priority_go_first_although_they_were_needed_last():
    manager = full_manager(8, prefix_caching=True)
    cached(manager, 0, [1] * 12)
    cached(manager, 1, [2] * 12, priority(0))
    cached(manager, 2, [3] * 12)
    assert (found(manager, [1] * 12), found(manager, [2] * 12), found(manager, [3] * 12)) == (12, 8, 12)
    cached(manager, 3, [4] * 8)
    assert (found(manager, [1] * 12), found(manager, [2] * 12)) == (12, 0)


def test_a_range_has_its_priority_and_the_rest_the_default():
    manager = full_manager(6, prefix_caching=True)
    cached(manager, 0, [1] * 16, priority(90, end=8))
    cached(manager, 1, [2] * 16)
    assert found(manager, [1] * 16) == 8


def test_a_priority_ends_and_the_blocks_are_then_as_if_needed_at_that_time():
    clock = Clock()
    manager = full_manager(8, prefix_caching=True, clock=clock)
    cached(manager, 0, [1] * 8, priority(80, seconds=10))
    cached(manager, 1, [2] * 8)
    clock.now = 10.0
    cached(manager, 2, [3] * 8)
    cached(manager, 3, [4] * 16)  # the step before, of the request 2, ended the priority: 2's blocks go first
    assert (found(manager, [1] * 8), found(manager, [2] * 8), found(manager, [3] * 8)) == (8, 0, 8)
    cached(manager, 4, [5] * 12)
    assert found(manager, [1] * 8) < 8
    assert not manager.parts.retention


def test_the_highest_priority_that_a_content_was_given_counts():
    manager = full_manager(6, prefix_caching=True)
    cached(manager, 0, [1] * 9, priority(80))
    assert cached(manager, 1, [1] * 9, priority(1)) == 8
    assert cached(manager, 2, [1] * 9) == 8
    cached(manager, 3, [2] * 24)
    assert found(manager, [1] * 8) == 0  # nothing else is left to evict
    assert not manager.parts.retention


def test_priorities_are_saved_with_the_time_that_they_have_left():
    clock, later = Clock(), Clock()
    manager = full_manager(8, prefix_caching=True, clock=clock)
    cached(manager, 0, [1] * 8, priority(80, seconds=10))
    cached(manager, 1, [2] * 8, priority(90))
    manager.add(2, 2, retention=priority(70))
    run(manager, 2, [3] * 8)
    clock.now = 4.0
    other = full_manager(8, prefix_caching=True, clock=later)
    load_memory(other, memory_data(manager))
    other.check_invariants()
    assert memory_data(other) == memory_data(manager)
    other.free(2)
    later.now = 6.0
    cached(other, 3, [4] * 8)
    cached(other, 4, [5] * 4)
    assert [found(other, [i] * 8) for i in (1, 2, 3)] == [4, 8, 8]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4), st.sampled_from([None, 0, 20, 35, 60, 100])), max_size=25),
    st.sampled_from(["lru", "aligned"]),
    st.booleans(),
)
def test_a_block_of_a_lower_priority_is_always_evicted_before_one_of_a_higher(requests, order, windows):
    manager = (
        window_manager(12, prefix_caching=True, prefix_eviction=order)
        if windows
        else full_manager(12, prefix_caching=True, prefix_eviction=order)
    )
    allocator, listener = manager.parts.allocator, manager._listener
    per_page = [group.blocks_per_page for group in allocator.groups]
    before = listener.evicted

    def evicted(g: int, block: int) -> None:
        level = levels.get((g, block))
        # Where a large page has several blocks, it goes as a whole, so only those within mixed pages can be compared.
        if level is not None and per_page[g] == 1 and not replaced:
            there = [key.level for key in allocator.groups[g].evictable.values()]
            assert all(other >= level for other in there)
        before(g, block)

    def discard(g: int, block: int) -> None:  # a content that was computed again replaces an equal one: none is lost
        replaced.append(block)
        discards(g, block)
        replaced.clear()

    replaced: list[int] = []
    discards, allocator.discard = allocator.discard, discard
    allocator._on_evict = evicted
    for number, (name, blocks, value) in enumerate(requests):
        levels = {
            (g, block): key.level for g, group in enumerate(allocator.groups) for block, key in group.evictable.items()
        }
        cached(manager, number, [name] * (4 * blocks + 1), None if value is None else priority(value))
        for g, group in enumerate(allocator.groups):
            keys = list(group.evictable.values())
            assert keys == sorted(keys)
            for page in range(allocator.pages.num_pages):
                if allocator.pages.is_idle[page] and allocator.pages.group[page] == g:
                    mine = range(page * per_page[g], (page + 1) * per_page[g])
                    highest = max(group.evictable[block] for block in mine if block in group.evictable)
                    assert allocator.pages.newest[page] == highest


@pytest.mark.parametrize(
    ("directives", "message"),
    [
        ([{"start": 0, "end": 0, "priority": 3}], "retention_directives.end=0"),
        ([{"start": -1, "end": None, "priority": 3}], "retention_directives.start=-1"),
        ([{"start": 0, "end": None, "priority": 101}], "retention_directives.priority=101"),
        ([{"start": 0, "end": None, "priority": 5, "duration": 0}], "retention_directives.duration=0"),
        ([{"start": 0}], "an entry has the fields start, end, priority, duration"),
        ("high", "must be a list"),
        ([{"start": 0, "end": None, "priority": 5}] * 65, "has 65 entries"),
    ],
)
def test_what_is_no_directive_is_refused_by_its_field(directives, message):
    with pytest.raises(ValueError, match=message):
        read_retention(directives, None)


def test_nothing_asked_is_nothing_kept():
    assert read_retention(None, None) is None and read_retention([], []) is None
    assert DEFAULT_PRIORITY == 35
