"""The five steps in their order, large pages that come and go, and promises that are kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.pages import NO_GROUP


class Pool:
    """An allocator with short verbs; a released block is kept (evictable) unless told otherwise."""

    def __init__(self, blocks_per_page, num_pages):
        self.evicted = []
        self.allocator = BlockAllocator(blocks_per_page, num_pages, lambda g, b: self.evicted.append((g, b)))
        self.tick = 0

    def request(self):
        return self.allocator.new_request()

    def take(self, request, n=1, g=0):
        needs = [0] * len(self.allocator.groups)
        needs[g] = n
        taken = self.allocator.take(needs, request)
        return None if taken is None else taken[g]

    def release(self, *blocks, g=0, keep=True):
        for block in blocks:
            self.tick += 1
            self.allocator.release(g, block, EvictionKey(self.tick, 0), keep)


def test_step_1_an_empty_block_of_the_requests_own_page_comes_first():
    pool = Pool([4], 3)
    a, b = pool.request(), pool.request()
    assert pool.take(a) == [0]
    assert pool.take(b, 4) == [4, 5, 6, 7]
    pool.release(5, keep=False)
    assert pool.take(a) == [1]
    assert pool.take(b) == [5]


def test_step_2_a_free_page_comes_before_another_requests_empty_block():
    pool = Pool([4], 2)
    a, b = pool.request(), pool.request()
    pool.take(a)
    assert pool.take(b, 4) == [4, 5, 6, 7]


def test_step_3_the_oldest_idle_page_comes_before_another_requests_empty_block():
    pool = Pool([2], 3)
    a, b, c = pool.request(), pool.request(), pool.request()
    first, second = pool.take(a, 2), pool.take(b, 2)
    pool.take(c)
    pool.release(*second)
    pool.release(*first)
    assert pool.take(pool.request(), 2) == second
    assert pool.evicted == [(0, block) for block in second]


def test_the_time_of_a_page_is_that_of_its_newest_block():
    pool = Pool([2], 2)
    a, b = pool.request(), pool.request()
    old, new = pool.take(a, 2), pool.take(b, 2)
    pool.release(old[0])
    pool.release(*new)
    pool.release(old[1])  # makes the page with the oldest block the newest page
    assert pool.take(pool.request(), 2) == new


def test_the_time_of_a_page_forgets_blocks_that_are_empty_again():
    pool = Pool([2], 2)
    a, b = pool.request(), pool.request()
    one, other = pool.take(a, 2), pool.take(b, 2)
    pool.release(one[0])
    pool.release(*other)
    pool.release(one[1])
    pool.allocator.share(0, one[1])
    pool.release(one[1], keep=False)  # nothing newer than the first release is left in this page
    assert pool.take(pool.request()) == [one[0]]
    assert pool.evicted == [(0, one[0])]


def test_a_hit_makes_a_page_the_newest():
    pool = Pool([1], 2)
    one, other = pool.take(pool.request(), 2)
    pool.release(one, other)
    pool.allocator.share(0, one)
    pool.release(one)
    assert pool.take(pool.request()) == [other]


def test_a_block_whose_low_priority_ends_makes_its_page_the_newest():
    pool = Pool([2], 2)
    low, other = pool.take(pool.request(), 2), pool.take(pool.request(), 2)
    pool.allocator.release(0, low[0], EvictionKey(1, 0).at_level(-1), True)
    pool.tick = 1
    pool.release(low[1], *other)
    pool.allocator.requeue(0, low[0], EvictionKey(9, 0))
    assert pool.take(pool.request(), 2) == other


def test_many_hits_leave_no_trail_of_old_times():
    pool = Pool([1], 2)
    blocks = pool.take(pool.request(), 2)
    pool.release(*blocks)
    for _ in range(500):
        pool.allocator.share(0, blocks[0])
        pool.release(blocks[0])
    assert len(pool.allocator.pages._idle_heap) < 100
    assert pool.take(pool.request()) == [blocks[1]]
    assert pool.take(pool.request()) == [blocks[0]]


def test_step_4_any_empty_block_comes_before_an_eviction_in_a_page_in_use():
    pool = Pool([3], 1)
    a, b = pool.request(), pool.request()
    blocks = pool.take(a, 2)
    pool.release(blocks[0])
    assert pool.take(b) == [2]
    assert pool.evicted == []


def test_step_5_evicts_the_least_recently_needed_block_of_the_group():
    pool = Pool([3], 1)
    blocks = pool.take(pool.request(), 3)
    pool.release(blocks[1])
    pool.release(blocks[0])
    assert pool.take(pool.request()) == [blocks[1]]
    assert pool.evicted == [(0, blocks[1])]


def test_pages_returned_last_are_handed_out_before_never_used_ones_whose_memory_is_not_there_yet():
    pool = Pool([1], 3)
    a = pool.request()
    pool.release(*pool.take(a, 2), keep=False)
    assert [pool.take(a)[0] for _ in range(3)] == [1, 0, 2]


def test_pages_that_are_free_are_vacated_at_once_or_when_they_stayed_so_for_a_whole_turn():
    pool = Pool([2], 4)
    a = pool.request()
    kept, cached, dropped = pool.take(a, 2)[0], pool.take(a, 2)[0], pool.take(a, 2)
    pool.release(cached)
    pool.release(*dropped, keep=False)
    pages = pool.allocator.pages
    free = dropped[0] // 2
    assert pages.take_vacated() == []
    again = pool.take(a, 2)
    assert {block // 2 for block in again} == {free}
    assert pages.take_vacated() == []  # in use
    pool.release(*again, keep=False)
    assert pages.take_vacated() == []  # it was in use since
    assert pages.take_vacated() == [free]
    assert pages.take_vacated() == []
    pool.release(*pool.take(a, 2), keep=False)
    assert pages.take_vacated(at_once=True) == [free]
    assert pages.take_vacated(at_once=True) == []
    pool.release(kept, keep=False)
    assert kept // 2 not in pages.take_vacated(at_once=True)  # its neighbour is in use still


def test_a_page_goes_back_when_all_its_blocks_are_empty_and_serves_another_group():
    pool = Pool([2, 3], 1)
    a = pool.request()
    blocks = pool.take(a, 2)
    assert pool.take(a, 1, g=1) is None
    pool.release(*blocks, keep=False)
    assert pool.allocator.pages.group == [NO_GROUP]
    assert pool.take(a, 3, g=1) == [0, 1, 2]


def test_an_idle_page_of_one_group_is_evicted_for_another():
    pool = Pool([2, 3], 1)
    pool.release(*pool.take(pool.request(), 2))
    assert pool.take(pool.request(), 1, g=1) == [0]
    assert pool.evicted == [(0, 0), (0, 1)]


def test_groups_do_not_take_each_others_last_page_by_preference():
    # Group 0 could take the last page by step 2, but has an empty block elsewhere; group 1 has none.
    pool = Pool([2, 3], 2)
    pool.take(pool.request(), 1, g=0)
    taken = pool.allocator.take([1, 1], pool.request())
    assert taken == [[1], [3]]


def test_sharing_an_evictable_block_saves_it_from_eviction():
    pool = Pool([1], 2)
    a, b = pool.take(pool.request(), 2)
    pool.release(a)
    pool.release(b)
    pool.allocator.share(0, a)
    assert pool.take(pool.request()) == [b]
    assert pool.take(pool.request()) is None


def test_a_shared_block_is_released_by_its_last_owner():
    pool = Pool([1], 1)
    (block,) = pool.take(pool.request())
    pool.allocator.share(0, block)
    pool.release(block, keep=False)
    assert pool.take(pool.request()) is None
    pool.release(block, keep=False)
    assert pool.take(pool.request()) == [block]


@pytest.mark.parametrize("block", [-1, 4])
def test_ids_out_of_range_raise(block):
    pool = Pool([2], 2)
    with pytest.raises(RuntimeError, match=rf"block {block} .* outside \[0, 4\)"):
        pool.allocator.share(0, block)
    with pytest.raises(RuntimeError, match="outside"):
        pool.release(block)
    for of_many in (pool.allocator.share_all, pool.allocator.release_owned):
        with pytest.raises(RuntimeError, match=rf"block {block} .* outside"):
            of_many(0, [0, block])


def test_sharing_or_releasing_what_nobody_owns_raises():
    pool = Pool([2], 1)
    with pytest.raises(RuntimeError, match="shared but empty"):
        pool.allocator.share(0, 0)
    with pytest.raises(RuntimeError, match="has no owner"):
        pool.release(0)
    taken = pool.take(pool.request())
    with pytest.raises(RuntimeError, match="has no other owner"):
        pool.allocator.release_owned(0, taken)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_what_pages_needed_promises_is_delivered_and_no_more(data):
    per_page = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    num_pages = data.draw(st.integers(1, 6))
    pool = Pool(per_page, num_pages)
    requests = [pool.request() for _ in range(3)]
    owned = []
    for _ in range(40):
        if data.draw(st.booleans()) and owned:
            g, block = owned.pop(data.draw(st.integers(0, len(owned) - 1)))
            pool.release(block, g=g, keep=data.draw(st.booleans()))
            continue
        needs = [data.draw(st.integers(0, 5)) for _ in per_page]
        # Brute force: blocks in use pin their pages to a group; all else can be given to anybody.
        pinned = [{block // n for h, block in owned if h == g} for g, n in enumerate(per_page)]
        in_use = [sum(h == g for h, _ in owned) for g in range(len(per_page))]
        spare = [len(pages) * n - used for pages, n, used in zip(pinned, per_page, in_use, strict=True)]
        pages = sum(-(-max(0, need - s) // n) for need, s, n in zip(needs, spare, per_page, strict=True))
        possible = pages <= num_pages - sum(len(p) for p in pinned)
        taken = pool.allocator.take(needs, data.draw(st.sampled_from(requests)))
        assert (taken is not None) == possible
        if taken is not None:
            new = [(g, block) for g, blocks in enumerate(taken) for block in blocks]
            assert [len(blocks) for blocks in taken] == needs
            assert not set(new) & set(owned) and len(set(new)) == len(new)
            owned += new


def test_a_packed_request_fills_mixed_pages_and_evicts_in_them_before_it_opens_another():
    pool = Pool([4, 1], 3)
    a, packed = pool.request(), pool.request()
    packed.packed = True
    first = pool.take(a, 3)
    assert pool.take(packed) == [3], "the empty block of another's page"
    pool.release(*first[:2])
    assert pool.take(packed, 2) == first[:2] and pool.evicted == [(0, block) for block in first[:2]]
    assert pool.take(packed) == [4], "all others are used"


def test_a_request_that_is_not_packed_keeps_what_mixed_pages_have_cached_while_pages_are_free():
    pool = Pool([4], 2)
    request = pool.request()
    first = pool.take(request, 4)
    pool.release(*first[:2])
    assert pool.take(request) == [4] and pool.evicted == []


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from([[1], [2], [4], [3, 2], [4, 1, 2]]), st.integers(2, 5), st.randoms(use_true_random=False))
def test_a_block_that_can_be_had_below_a_level_costs_none_of_a_higher_one(blocks_per_page, num_pages, chance):
    pool, kept, used = Pool(blocks_per_page, num_pages), {}, []
    requests = [pool.request() for _ in range(3)]
    requests[0].packed = True
    for tick in range(30):
        g, level, request = chance.randrange(len(blocks_per_page)), chance.randint(-1, 1), chance.choice(requests)
        if pool.allocator.has_below(g, level, request):
            pool.evicted.clear()
            used += [(g, block) for block in pool.take(request, g=g)]
            assert all(kept[block] <= level for block in pool.evicted)
        if used and chance.random() < 0.6:
            g, block = used.pop(chance.randrange(len(used)))
            level, protect = chance.randint(-1, 2), chance.random() < 0.1
            kept[g, block] = 3 if protect else level
            pool.allocator.release(g, block, EvictionKey(tick, 0).at_level(level), True, protect)


@settings(max_examples=examples(100), deadline=None)
@given(blocks_per_page=st.integers(1, 5), window=st.integers(1, 9), steps=st.lists(st.integers(1, 4), max_size=30))
def test_a_packed_requests_window_never_has_more_pages_than_its_blocks_fill(blocks_per_page, window, steps):
    pool = Pool([blocks_per_page], 20)
    request = pool.request()
    request.packed = True
    live, peak = [], 0
    for more in steps:
        live += pool.take(request, more)
        peak = max(peak, len(live))
        assert len({block // blocks_per_page for block in live}) <= -(-peak // blocks_per_page)
        while len(live) > window:
            pool.release(live.pop(0))


@pytest.mark.parametrize("per_page", [2, 5, 64])
def test_a_request_that_would_fill_no_page_uses_others_empty_blocks_before_one_is_opened(per_page):
    pool = Pool([per_page, 1], 3)
    a, b = pool.request(), pool.request()
    assert pool.take(a) == [0]
    assert pool.take(b, per_page - 1) == [*range(1, per_page)]
    assert pool.take(b) == [per_page], "the first page is full"
    assert pool.take(a, g=1) == [2], "another group still gets a page"


@pytest.mark.parametrize("per_page", [2, 5, 64])
def test_a_request_that_fills_pages_gets_them_whole_and_leaves_only_its_rest_among_others(per_page):
    pool = Pool([per_page], 4)
    a, b = pool.request(), pool.request()
    assert pool.take(a) == [0]
    blocks = pool.take(b, 2 * per_page + 1)
    assert blocks == [*range(per_page, 3 * per_page), 1]
    pool.release(*blocks, keep=False)
    assert len(pool.allocator.pages.free) == 3


def test_of_a_shared_page_the_oldest_cached_block_goes_before_an_idle_page_that_was_needed_later():
    pool = Pool([8, 1], 2)
    a, b = pool.request(), pool.request()
    blocks = pool.take(a, 8)
    (state,) = pool.take(b, g=1)
    pool.release(blocks[3], blocks[7])
    pool.release(state, g=1)
    pool.release(blocks[5])
    assert pool.take(b) == [blocks[3]]
    assert pool.take(b) == [blocks[7]]
    assert pool.evicted == [(0, blocks[3]), (0, blocks[7])]
    assert pool.take(b) == [8], "then the page of the state, which is older"
    assert pool.evicted[-1] == (1, state)


def test_an_idle_page_is_evicted_whole_for_a_request_that_fills_it():
    pool = Pool([4, 1], 2)
    a, b = pool.request(), pool.request()
    blocks = pool.take(a, 4)
    (state,) = pool.take(b, g=1)
    pool.release(*blocks)
    assert sorted(pool.take(b, 4)) == blocks and len(pool.evicted) == 4
    pool.release(blocks[0])  # in a mixed page, and older than the other group's idle page
    pool.release(state, g=1)
    assert pool.take(b, 4)[0] == blocks[0]
