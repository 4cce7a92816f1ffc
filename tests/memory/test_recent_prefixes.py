"""What recent requests began with, and how much of that a new one shares."""

from __future__ import annotations

from memory_pools import full_manager

from jpaged.memory.block_tables import BlockTables
from jpaged.memory.recent_prefixes import MOST_REQUESTS, RecentPrefixes
from jpaged.memory.saving.saved_parts import load_recent, recent_data

SIZE = 4


def recent(num_blocks: int = 1000) -> tuple[RecentPrefixes, object]:
    manager = full_manager(num_blocks, SIZE, prefix_caching=True)
    return RecentPrefixes(manager.layout), manager


def sequence(manager, number: int, tokens: list[int], salt: str | None = None) -> BlockTables:
    """A sequence whose prompt is in its hash chains."""
    manager.add(number, number)
    manager.match_prefix(number, tokens, salt=salt)
    return manager.parts.sequences[number]


def arrived(prefixes: RecentPrefixes, one: BlockTables) -> int:
    """Let a request begin to run; return the tokens that it shares."""
    shared = prefixes.look(one)
    assert prefixes.arrived(one) in (shared, None)
    return shared.tokens


def test_a_request_shares_the_whole_blocks_that_an_earlier_one_began_with():
    prefixes, manager = recent()
    prompts = [range(20), [*range(10), 90, 91, 92], range(100, 120), range(17)]
    shared = [arrived(prefixes, sequence(manager, i, list(prompt))) for i, prompt in enumerate(prompts)]
    assert shared == [0, 8, 0, 16]


def test_a_request_that_comes_back_shares_nothing_with_itself():
    prefixes, manager = recent()
    one = sequence(manager, 0, list(range(20)))
    assert arrived(prefixes, one) == arrived(prefixes, one) == 0
    assert arrived(prefixes, sequence(manager, 1, list(range(20)))) == 16


def test_salts_share_nothing():
    prefixes, manager = recent()
    arrived(prefixes, sequence(manager, 0, list(range(20)), "a"))
    assert arrived(prefixes, sequence(manager, 1, list(range(20)), "b")) == 0
    assert arrived(prefixes, sequence(manager, 2, list(range(20)), "a")) == 16


def test_what_was_generated_may_be_the_next_prompt():
    prefixes, manager = recent()
    one = sequence(manager, 0, list(range(9)))
    arrived(prefixes, one)
    manager.allocate(0, 20, first_write=0)
    manager.commit(0, list(range(20)), 20)
    prefixes.ended(one)
    assert arrived(prefixes, sequence(manager, 1, list(range(30)))) == 20


def test_running_requests_are_remembered_and_twice_as_many_as_ran_at_once():
    manager, running, number = full_manager(4000, SIZE, prefix_caching=True), set(), 200
    prefixes = RecentPrefixes(manager.layout, running)
    for i in range(number):
        running.add(i)
        arrived(prefixes, sequence(manager, i, [i] * 9))
    running.intersection_update({0, 7})
    for i in range(number, 4 * number):
        arrived(prefixes, sequence(manager, i, [i] * 9))
    assert len(prefixes.entries) == prefixes.most_requests == 2 * number
    assert list(prefixes.entries)[:3] == [0, 7, 2 * number + 2], "the oldest that had ended went"
    running.clear()
    arrived(prefixes, sequence(manager, 4 * number, [1]))
    assert len(prefixes.entries) == 2 * number and 0 not in prefixes.entries


def test_all_that_is_remembered_is_saved_and_brought_back_although_fewer_run_then():
    manager, running = full_manager(4000, SIZE, prefix_caching=True), set(range(150))
    prefixes, again = RecentPrefixes(manager.layout, running), RecentPrefixes(manager.layout)
    for i in range(300):
        arrived(prefixes, sequence(manager, i, [i] * 9))
    load_recent(again, recent_data(prefixes))
    assert again.entries == prefixes.entries and len(again.entries) == 300


def test_what_runs_is_remembered_although_it_fills_the_pool_twice():
    manager, running = full_manager(4, SIZE, prefix_caching=True), {0}
    prefixes = RecentPrefixes(manager.layout, running)
    for number in range(5):
        arrived(prefixes, sequence(manager, number, [number] * 13))
    assert list(prefixes.entries) == [0, 4]


def test_old_requests_are_forgotten_by_their_number_and_by_the_pools_size():
    prefixes, manager = recent()
    for number in range(MOST_REQUESTS + 1):
        arrived(prefixes, sequence(manager, number, [number] * 9))
    assert len(prefixes.entries) == MOST_REQUESTS
    assert arrived(prefixes, sequence(manager, 1000, [0] * 9)) == 0
    assert arrived(prefixes, sequence(manager, 1001, [MOST_REQUESTS] * 9)) == 8
    small, manager = recent(4)
    for number in range(5):
        arrived(small, sequence(manager, number, [number] * 13))
    assert len(small.entries) == 2, "three blocks each, and at most eight"
