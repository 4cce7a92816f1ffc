"""Fork, append and free: what they take, copy and give back (PagedAttention, sections 4.3, 4.4 and 5.2)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_pools import counts, full_manager, run, serve, window_manager

from jpaged.memory import NO_BLOCK, BlockCopy

TOKENS = list(range(100))


def test_fork_keeps_the_free_count():
    manager = full_manager()
    serve(manager, 0, TOKENS[:10])
    before = manager.free_blocks(0)
    manager.fork(0, 1)
    assert manager.free_blocks(0) == before
    assert manager.block_table(1, 0) == manager.block_table(0, 0)


def test_freeing_the_parent_of_a_fork_frees_nothing_and_the_last_owner_all():
    manager = full_manager(20)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    manager.free(0)
    assert manager.free_blocks(0) == 17
    manager.free(1)
    assert manager.free_blocks(0) == 20


def test_append_to_a_shared_partial_tail_copies_exactly_one_block():
    manager = full_manager(block_size=4)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    tail = manager.block_table(0, 0)[2]
    assert manager.block_table(1, 0)[2] == tail
    copies = manager.allocate(1, 11, first_write=10)
    assert copies == [BlockCopy(0, tail, manager.block_table(1, 0)[2])]
    assert manager.block_table(1, 0)[:2] == manager.block_table(0, 0)[:2]
    assert manager.block_table(1, 0)[2] != tail


def test_the_last_owner_of_a_tail_writes_in_place():
    manager = full_manager(block_size=4)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    manager.allocate(1, 11, first_write=10)
    table = list(manager.block_table(0, 0))
    assert manager.block_table(1, 0)[2] != table[2]
    assert manager.allocate(0, 11, first_write=10) == []
    assert manager.block_table(0, 0) == table


def test_append_to_a_shared_full_tail_copies_none():
    manager = full_manager(block_size=4)
    serve(manager, 0, TOKENS[:8])
    manager.fork(0, 1)
    assert manager.allocate(1, 9, first_write=8) == []
    assert len(manager.block_table(1, 0)) == 3


def test_append_to_a_shared_partial_tail_copies_one_block_in_every_group():
    manager = window_manager()
    serve(manager, 0, TOKENS[:5])
    manager.fork(0, 1)
    assert [copy.group for copy in manager.allocate(1, 6, first_write=5)] == [0, 1]


def test_a_shared_block_without_written_tokens_is_replaced_without_a_copy():
    manager = full_manager(block_size=4)
    manager.add(0, 0)
    manager.allocate(0, 12, first_write=0)  # slots ahead of the tokens
    manager.commit(0, TOKENS, 5)
    manager.fork(0, 1)
    copies = manager.allocate(1, 10, first_write=5)
    assert [copy.src for copy in copies] == [manager.block_table(0, 0)[1]]
    assert manager.block_table(0, 0)[2] != manager.block_table(1, 0)[2]


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 7))
def test_appending_k_tokens_takes_the_blocks_between_the_two_lengths(p, k, block_size):
    manager = full_manager(100, block_size)
    manager.add(0, 0)
    manager.allocate(0, p, first_write=0)
    before = manager.free_blocks(0)
    manager.allocate(0, p + k, first_write=p)
    assert before - manager.free_blocks(0) == math.ceil((p + k) / block_size) - math.ceil(p / block_size)


@pytest.mark.parametrize("caching", [False, True])
def test_failure_to_allocate_changes_no_count(caching):
    manager = full_manager(4, 4, prefix_caching=caching)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    before = counts(manager), list(manager.block_table(1, 0))
    assert manager.allocate(1, 14, first_write=10) is None  # a copy and a new block, one is left
    assert before == (counts(manager), list(manager.block_table(1, 0)))
    manager.check_invariants()


def test_capacity_is_that_of_the_tightest_group_and_holds_without_another_allocation():
    manager = window_manager()
    manager.add(0, 0)
    manager.allocate(0, 3, first_write=0)
    assert manager.capacity(0) == 4
    free = manager.free_blocks(0), manager.free_blocks(1)
    assert manager.allocate(0, 4, first_write=3) == []
    assert free == (manager.free_blocks(0), manager.free_blocks(1))


def test_a_window_frees_block_0_after_5_computed_tokens():
    manager = window_manager(window=4)
    manager.add(0, 0)
    manager.allocate(0, 5, first_write=0)
    manager.commit(0, TOKENS, 4)
    assert NO_BLOCK not in manager.block_table(0, 1)
    free = manager.free_blocks(1)
    manager.commit(0, TOKENS, 5)
    assert manager.block_table(0, 1)[0] == NO_BLOCK
    assert NO_BLOCK not in manager.block_table(0, 0)
    assert manager.free_blocks(1) == free + 1


def test_a_window_of_a_long_sequence_holds_a_constant_number_of_blocks():
    manager = window_manager(60, window=4)
    manager.add(0, 0)
    for length in range(1, 100):
        manager.allocate(0, length, first_write=length - 1)
        manager.commit(0, TOKENS, length)
        assert sum(block != NO_BLOCK for block in manager.block_table(0, 1)) <= 3


def test_parent_and_child_of_a_fork_leave_their_windows_each_on_its_own():
    manager = window_manager(60, window=4)
    serve(manager, 0, TOKENS[:6])
    manager.fork(0, 1)
    for seq_id in (0, 1):
        run(manager, seq_id, TOKENS[:20], start=6)
        assert sum(block != NO_BLOCK for block in manager.block_table(seq_id, 1)) == 2


def test_a_commit_tells_whether_it_released_a_block():
    manager = window_manager(window=4)
    manager.add(0, 0)
    manager.allocate(0, 5, first_write=0)
    assert not manager.commit(0, TOKENS, 4)
    assert manager.commit(0, TOKENS, 5)  # the window leaves block 0
    manager.fork(0, 1)
    assert manager.allocate(0, 6, first_write=5) != []
    assert not manager.commit(0, TOKENS, 6), "a copy on write is no release"


def test_maps_follow_whatever_changes_a_table():
    manager = window_manager()
    owners = []

    def seen() -> list[tuple[int, int]]:
        """The blocks that sequences have, by the newest map, which is made of the one before."""
        found = manager.map()
        used = [
            (g, block)
            for g, group in enumerate(found.groups)
            for block in range(group.num_blocks)
            if found.block(g, block).owners
        ]
        tables = {(g, block) for s in owners for g in range(2) for block in manager.block_table(s, g)}
        assert set(used) == {(g, block) for g, block in tables if block != NO_BLOCK}
        return used

    manager.add(0, 0)
    owners.append(0)
    assert seen() == []
    manager.allocate(0, 3, first_write=0)
    assert len(seen()) == 4
    manager.allocate(0, 5, first_write=4)
    assert len(seen()) == 6
    manager.commit(0, TOKENS, 5)  # the window releases a block
    assert len(seen()) == 5
    manager.fork(0, 1)
    owners.append(1)
    assert len(seen()) == 5
    manager.allocate(0, 6, first_write=5)  # copy-on-write of a block of each group
    assert len(seen()) == 7
    manager.free(0)
    manager.add(0, 0)
    assert len(seen()) == 5, "a reused id must not look unchanged"


def test_sequences_of_a_request_are_placed_in_its_own_pages():
    manager = window_manager()
    manager.add(0, 7)
    manager.add(1, 8)
    manager.add(2, 7)
    for seq_id, blocks in ((0, 4), (1, 3), (2, 2)):  # a page of the window has 3
        manager.allocate(seq_id, 2 * blocks, first_write=0)
    pages = [[block // 3 for block in manager.block_table(s, 1)] for s in (0, 1, 2)]
    assert len(set(pages[1])) == 1 and pages[1][0] not in pages[0]
    assert pages[2] == [pages[0][3]] * 2


def test_wrong_calls_raise_naming_the_sequence():
    manager = full_manager()
    with pytest.raises(KeyError, match="sequence 3 has no block tables"):
        manager.allocate(3, 1, first_write=0)
    manager.add(3, 3)
    with pytest.raises(ValueError, match="sequence 3 exists"):
        manager.add(3, 3)
    with pytest.raises(ValueError, match="sequence 3 exists"):
        manager.fork(3, 3)
    with pytest.raises(ValueError, match="first_write=5 leaves a hole after 0 tokens"):
        manager.allocate(3, 6, first_write=5)
    manager.free(3)
    with pytest.raises(KeyError, match="sequence 3"):
        manager.free(3)


def test_a_write_behind_a_window_raises():
    manager = window_manager(window=4)
    manager.add(0, 0)
    run(manager, 0, TOKENS[:9])
    with pytest.raises(ValueError, match="first_write=1 lies in a released block"):
        manager.allocate(0, 10, first_write=1)
