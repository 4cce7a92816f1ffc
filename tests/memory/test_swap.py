"""Swapping: what moves, what stays shared, what is refused (PagedAttention, section 4.5)."""

from __future__ import annotations

import pytest
from memory_pools import counts, full_manager, run, serve, window_manager

from jpaged.memory import NO_BLOCK, HostBlock, SwapCopy

TOKENS = list(range(100))
BLOCK = 8  # bytes of a block of full_manager


def swapping(num_blocks: int = 20, host_blocks: int | None = None, **options):
    return full_manager(num_blocks, swap_space_bytes=(host_blocks or num_blocks) * BLOCK, **options)


def host_blocks(manager) -> int:
    return manager.swap_space.host.num_used(0)


def test_a_block_shared_by_two_sequences_moves_once_and_comes_back_shared():
    manager = swapping()
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    run(manager, 1, [*TOKENS[:9], 77, 78], start=9)  # its own third block
    old = [list(manager.block_table(s, 0)) for s in (0, 1)]
    out = manager.swap_space.move_out([0, 1])
    assert [copy.device_block for copy in out] == [*old[0], old[1][2]]
    assert counts(manager) == (0, 0, 20) and host_blocks(manager) == 4
    back = manager.swap_space.move_in([0, 1])
    manager.dispatched()
    assert [copy.host_block for copy in back] == [copy.host_block for copy in out]
    new = {copy.host_block: copy.device_block for copy in back}
    where = {copy.device_block: new[copy.host_block] for copy in out}
    assert [manager.block_table(s, 0) for s in (0, 1)] == [[where[b] for b in table] for table in old]
    assert counts(manager) == (4, 0, 16) and host_blocks(manager) == 0
    manager.free(0)
    assert counts(manager) == (3, 0, 17), "the two shared blocks had two owners again"


def test_a_host_too_small_for_all_blocks_takes_none():
    manager = swapping(host_blocks=2)
    serve(manager, 0, TOKENS[:10])
    before = counts(manager), list(manager.block_table(0, 0))
    assert manager.swap_space.move_out([0]) is None
    assert before == (counts(manager), list(manager.block_table(0, 0)))
    assert host_blocks(manager) == 0 and not manager.swap_space.holds(0)


def test_a_pool_without_room_for_all_blocks_takes_none_back():
    manager = swapping(6)
    serve(manager, 0, TOKENS[:12])
    manager.swap_space.move_out([0])
    serve(manager, 1, TOKENS[:16])
    assert manager.swap_space.move_in([0], keep_room=False) is None
    assert manager.swap_space.holds(0) and host_blocks(manager) == 3 and counts(manager) == (4, 0, 2)


def test_a_request_that_comes_back_goes_out_again_in_a_later_step_only():
    """Its blocks are filled in the step, after all that goes out, from host blocks that nothing else gets before."""
    manager = swapping()
    serve(manager, 0, TOKENS[:10])
    manager.swap_space.move_out([0])
    manager.dispatched()
    manager.swap_space.move_in([0])
    assert manager.swap_space.move_out([0]) is None and not manager.swap_space.holds(0)
    assert host_blocks(manager) == 3
    manager.dispatched()
    assert host_blocks(manager) == 0
    assert len(manager.swap_space.move_out([0])) == 3


def test_room_to_append_is_kept_for_every_sequence_unless_told_otherwise():
    manager = swapping(6)
    serve(manager, 0, TOKENS[:12])
    manager.fork(0, 1)
    manager.swap_space.move_out([0, 1])
    serve(manager, 2, TOKENS[:8])
    assert manager.swap_space.move_in([0, 1]) is None  # 3 blocks fit the 4 that are free, 3 + 2 do not
    assert len(manager.swap_space.move_in([0, 1], keep_room=False)) == 3


def test_the_watermark_is_kept_too():
    manager = swapping(10, watermark=0.3)
    serve(manager, 0, TOKENS[:12])
    manager.swap_space.move_out([0])
    serve(manager, 1, TOKENS[:16])
    assert manager.swap_space.move_in([0]) is None  # 3 + 1 blocks, 6 are free, 3 of them stay so
    assert manager.swap_space.move_in([0], keep_room=False) is not None


def test_blocks_behind_a_window_are_not_moved():
    manager = window_manager(window=4, swap_space_bytes=100)
    serve(manager, 0, TOKENS[:11])
    released = manager.block_table(0, 1).count(NO_BLOCK)
    out = manager.swap_space.move_out([0])
    assert released == 4 and [copy.group for copy in out] == [0] * 6 + [1] * 2
    manager.swap_space.move_in([0])
    assert manager.block_table(0, 1)[:released] == [NO_BLOCK] * released
    assert NO_BLOCK not in manager.block_table(0, 1)[released:]


def test_bytes_of_all_groups_count_against_one_bound():
    size = 6 * 3 + 2 * 2  # 11 tokens: 6 blocks of 3 bytes, 2 of 2 within the window
    for limit, fits in ((size, True), (size - 1, False)):
        manager = window_manager(window=4, swap_space_bytes=limit)
        serve(manager, 0, TOKENS[:11])
        assert (manager.swap_space.move_out([0]) is not None) == fits


def test_cached_blocks_stay_on_the_device_when_their_sequence_is_swapped_out():
    manager = swapping(prefix_caching=True)
    serve(manager, 0, TOKENS[:10])
    manager.swap_space.move_out([0])
    assert counts(manager) == (0, 2, 20)
    assert serve(manager, 1, TOKENS[:10]) == 8


def test_blocks_that_were_swapped_in_hit_again():
    manager = swapping(4, prefix_caching=True)
    serve(manager, 0, TOKENS[:10])
    manager.swap_space.move_out([0])
    serve(manager, 1, [5] * 16)  # evicts what had stayed
    manager.free(1)
    manager.swap_space.move_in([0], keep_room=False)
    manager.commit(0, TOKENS, 10)
    manager.free(0)
    assert serve(manager, 2, TOKENS[:10]) == 8


def test_a_block_shared_with_another_request_stays_with_it():
    manager = swapping(prefix_caching=True)
    serve(manager, 0, TOKENS[:10])
    assert serve(manager, 1, TOKENS[:10]) == 8
    out = manager.swap_space.move_out([1])
    assert len(out) == 3, "the blocks of the prefix are copied as well"
    assert counts(manager)[0] == 3
    assert manager.block_table(0, 0)[:2] == [copy.device_block for copy in out[:2]]


def test_a_fork_of_a_swapped_sequence_shares_its_host_blocks():
    manager = swapping()
    serve(manager, 0, TOKENS[:10])
    manager.swap_space.move_out([0])
    manager.fork(0, 1)
    assert manager.swap_space.holds(1) and host_blocks(manager) == 3
    manager.free(0)
    assert manager.swap_space.take_dropped() == [] and host_blocks(manager) == 3
    assert len(manager.swap_space.move_in([1])) == 3
    assert counts(manager) == (3, 0, 17)


def test_freed_host_blocks_are_named_once_and_used_again():
    manager = swapping()
    serve(manager, 0, TOKENS[:10])
    out = manager.swap_space.move_out([0])
    manager.free(0)
    assert sorted(manager.swap_space.take_dropped()) == [HostBlock(0, copy.host_block) for copy in out]
    assert manager.swap_space.take_dropped() == []
    serve(manager, 1, TOKENS[:10])
    assert {c.host_block for c in manager.swap_space.move_out([1])} == {c.host_block for c in out}


def test_only_all_sequences_of_one_request_are_swapped():
    manager = swapping()
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    serve(manager, 2, TOKENS[:10])
    for wrong in ([0], [0, 1, 2], [0, 0], []):
        with pytest.raises(ValueError, match="not all of one request"):
            manager.swap_space.move_out(wrong)
    manager.swap_space.move_out([2])
    with pytest.raises(KeyError, match=r"sequence 2 .* swapped out"):
        manager.allocate(2, 11, first_write=10)
    with pytest.raises(ValueError, match="sequence 2 exists"):
        manager.add(2, 2)


def test_swap_space_is_bounded_by_the_pool():
    with pytest.raises(ValueError, match=r"swap_space_bytes=161 is outside \[0, 160\], the pool"):
        full_manager(20, swap_space_bytes=161)
    with pytest.raises(ValueError, match="swap_space_bytes=-1"):
        full_manager(20, swap_space_bytes=-1)


def test_without_swap_space_nothing_is_swapped():
    manager = full_manager()
    serve(manager, 0, TOKENS[:10])
    assert manager.swap_space.move_out([0]) is None


def test_a_copy_names_group_device_and_host_block():
    manager = swapping()
    serve(manager, 0, TOKENS[:3])
    assert manager.swap_space.move_out([0]) == [SwapCopy(group=0, device_block=0, host_block=0)]


def test_the_report_shows_host_blocks_only_where_there_is_swap_space():
    manager = swapping()
    serve(manager, 0, TOKENS[:10])
    manager.swap_space.move_out([0])
    report = manager.report()
    assert (report.groups[0].host_used, report.groups[0].host_blocks) == (3, 20)
    assert (report.host_used_bytes, report.host_bytes) == (24, 160)
    assert "swap space of 160 B: 24 B used; blocks used/most: full 3/20" in str(report)
    assert "swap space" not in str(full_manager().report())
