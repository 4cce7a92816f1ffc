"""What every paged KV manager has to do, one behaviour a test, on blocks and counts alone."""

from __future__ import annotations

import math

import pytest
from memory_pools import counts, full_manager, run, serve

from jpaged.memory import BlockCopy, Fit, Need

TOKENS = list(range(100))


def table(manager, seq_id: int) -> list[int]:
    return list(manager.block_table(seq_id, 0))


def ref_counts(manager, blocks: list[int]) -> list[int]:
    return [manager.parts.allocator.groups[0].ref_count[block] for block in blocks]


def test_fork_keeps_the_free_count():
    manager = full_manager()
    serve(manager, 0, TOKENS[:10])
    before = manager.free_blocks(0)
    manager.fork(0, 1)
    assert manager.free_blocks(0) == before
    assert ref_counts(manager, table(manager, 1)) == [2, 2, 2]


def test_freeing_the_parent_of_a_fork_frees_nothing():
    manager = full_manager(20)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    manager.free(0)
    assert manager.free_blocks(0) == 17


def test_freeing_the_last_owner_of_a_fork_frees_all():
    manager = full_manager(20)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    manager.free(0)
    manager.free(1)
    assert manager.free_blocks(0) == 20


def test_append_to_a_shared_partial_tail_copies_exactly_one_block():
    manager = full_manager(block_size=4)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    tail = table(manager, 0)[-1]
    assert manager.allocate(1, 11, first_write=10) == [BlockCopy(0, tail, table(manager, 1)[-1])]


def test_append_to_a_shared_full_tail_copies_none():
    manager = full_manager(block_size=4)
    serve(manager, 0, TOKENS[:8])
    manager.fork(0, 1)
    assert manager.allocate(1, 9, first_write=8) == []
    assert table(manager, 1)[:2] == table(manager, 0)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("p", [0, 1, 4, 15, 16, 17])
@pytest.mark.parametrize("k", [0, 1, 3, 16, 33])
def test_appending_k_tokens_takes_the_difference_of_the_ceilings(p, k, size):
    manager = full_manager(100, size)
    manager.add(0, 0)
    manager.allocate(0, p, first_write=0)
    before = manager.free_blocks(0)
    manager.allocate(0, p + k, first_write=p)
    assert before - manager.free_blocks(0) == math.ceil((p + k) / size) - math.ceil(p / size)


def test_can_allocate_is_never_when_it_could_not_fit_an_empty_pool_above_the_watermark():
    manager = full_manager(10, block_size=4, watermark=0.2)
    assert manager.can_admit(Need(32)) is Fit.OK
    assert manager.can_admit(Need(33)) is Fit.NEVER


def test_can_allocate_is_later_or_ok_by_free_blocks():
    manager = full_manager(10, block_size=4, watermark=0.2)
    serve(manager, 0, TOKENS[:12])
    assert manager.can_admit(Need(20)) is Fit.OK
    assert manager.can_admit(Need(21)) is Fit.LATER
    manager.free(0)
    assert manager.can_admit(Need(21)) is Fit.OK


def test_swap_out_and_in_maps_every_block_once():
    manager = full_manager(20, block_size=4, swap_space_bytes=160)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    run(manager, 1, [*TOKENS[:10], 55], start=10)
    old = [table(manager, 0), table(manager, 1)]
    out = manager.swap_space.move_out([0, 1])
    assert sorted(copy.device_block for copy in out) == sorted(set(old[0] + old[1]))
    assert len({copy.host_block for copy in out}) == len(out) == 4
    back = manager.swap_space.move_in([0, 1])
    assert sorted(copy.host_block for copy in back) == sorted(copy.host_block for copy in out)
    new = [table(manager, 0), table(manager, 1)]
    assert sorted(copy.device_block for copy in back) == sorted(set(new[0] + new[1]))
    assert [ref_counts(manager, blocks) for blocks in new] == [[2, 2, 1], [2, 2, 1]]


def test_55_tokens_in_blocks_of_16_are_three_hashed_blocks():
    manager = full_manager(block_size=16, prefix_caching=True)
    serve(manager, 0, TOKENS[:55])
    hashed = [manager.parts.cache.holds(0, block) for block in table(manager, 0)]
    assert hashed == [True, True, True, False]


def test_the_second_request_of_55_tokens_reuses_three_blocks_with_count_2():
    manager = full_manager(block_size=16, prefix_caching=True)
    serve(manager, 0, TOKENS[:55])
    assert serve(manager, 1, TOKENS[:55]) == 48
    assert table(manager, 1)[:3] == table(manager, 0)[:3]
    assert ref_counts(manager, table(manager, 1)) == [2, 2, 2, 1]


def test_free_order_is_never_used_first_then_tails_before_heads():
    manager = full_manager(6, block_size=4, prefix_caching=True)
    serve(manager, 0, TOKENS[:12])
    head, middle, tail = table(manager, 0)
    manager.free(0)
    serve(manager, 1, [7] * 24)
    assert table(manager, 1) == [3, 4, 5, tail, middle, head]


def test_a_hit_on_a_freed_block_takes_it_out_of_the_free_list_before_anything_is_evicted():
    manager = full_manager(4, block_size=4, prefix_caching=True)
    serve(manager, 0, TOKENS[:8])
    hit = table(manager, 0)
    manager.free(0)
    serve(manager, 1, [7] * 4)
    manager.free(1)
    assert (
        serve(manager, 2, [*TOKENS[:8], 1, 2, 3, 4, 5]) == 8
    )  # two blocks beside the hit: the free one and that of [7] * 4
    assert table(manager, 2)[:2] == hit
    assert len(set(table(manager, 2))) == 4


def test_a_reused_block_loses_its_hash():
    manager = full_manager(2, block_size=4, prefix_caching=True)
    serve(manager, 0, TOKENS[:8])
    manager.free(0)
    serve(manager, 1, [7] * 8)
    manager.free(1)
    assert serve(manager, 2, TOKENS[:8]) == 0


def test_failure_to_allocate_changes_no_count():
    manager = full_manager(4, block_size=4, prefix_caching=True)
    serve(manager, 0, TOKENS[:10])
    manager.fork(0, 1)
    before = counts(manager), ref_counts(manager, [0, 1, 2, 3]), table(manager, 1)
    assert manager.allocate(1, 14, first_write=10) is None
    assert (counts(manager), ref_counts(manager, [0, 1, 2, 3]), table(manager, 1)) == before


def test_the_same_tokens_with_another_salt_do_not_hit():
    manager = full_manager(prefix_caching=True)
    serve(manager, 0, TOKENS[:20], salt="a")
    assert serve(manager, 1, TOKENS[:20], salt="b") == 0
    assert serve(manager, 2, TOKENS[:20]) == 0
    assert serve(manager, 3, TOKENS[:20], salt="a") == 16
