"""can_allocate: OK, LATER or NEVER, in large pages over all groups (PagedAttention, section 4.5)."""

from __future__ import annotations

import pytest
from memory_pools import full_manager, window_manager

from jpaged.memory import Fit, Need


def test_never_when_it_could_not_fit_an_empty_pool_above_the_watermark():
    manager = full_manager(100, 4, watermark=0.02)
    assert manager.can_admit(Need(98 * 4)) is Fit.OK
    assert manager.can_admit(Need(98 * 4 + 1)) is Fit.NEVER


def test_later_or_ok_by_free_blocks():
    manager = full_manager(100, 4, watermark=0.02)
    manager.add(0, 0)
    manager.allocate(0, 50 * 4, first_write=0)
    assert manager.can_admit(Need(48 * 4)) is Fit.OK
    assert manager.can_admit(Need(48 * 4 + 1)) is Fit.LATER
    manager.free(0)
    assert manager.can_admit(Need(48 * 4 + 1)) is Fit.OK


def test_running_sequences_may_use_the_watermark():
    manager = full_manager(100, 4, watermark=0.5)
    manager.add(0, 0)
    assert manager.allocate(0, 400, first_write=0) == []


def test_every_further_sequence_of_a_request_costs_a_tail_block():
    manager = full_manager(10, 4, watermark=0)
    assert manager.can_admit(Need(30, num_seqs=3)) is Fit.OK  # 8 shared blocks and two copies
    assert manager.can_admit(Need(30, num_seqs=4)) is Fit.NEVER


def test_cached_blocks_without_an_owner_count_as_free():
    manager = full_manager(10, 4, watermark=0, prefix_caching=True)
    manager.add(0, 0)
    manager.allocate(0, 40, first_write=0)
    manager.commit(0, list(range(40)), 40)
    manager.free(0)
    assert manager.report().groups[0].evictable == 10
    assert manager.can_admit(Need(40)) is Fit.OK


def test_attached_tokens_are_not_counted_twice():
    manager = full_manager(10, 4, watermark=0, prefix_caching=True)
    tokens = list(range(40))
    manager.add(0, 0)
    manager.allocate(0, 40, first_write=0)
    manager.commit(0, tokens, 40)
    manager.add(1, 1)
    manager.free(0)
    cached = manager.match_prefix(1, tokens)
    assert cached == 36
    assert manager.can_admit(Need(40)) is Fit.LATER
    assert manager.can_admit(Need(40, cached_tokens=cached)) is Fit.OK


def test_all_groups_share_the_large_pages():
    manager = window_manager(10, window=100, watermark=0)
    # 12 blocks in each group: 6 large pages of group 0 and 4 of group 1.
    assert manager.can_admit(Need(24)) is Fit.OK
    assert manager.can_admit(Need(25)) is Fit.NEVER


def test_a_window_needs_what_a_step_and_the_window_hold_at_once():
    prompt = 34  # 17 blocks, 9 large pages of group 0
    assert window_manager(12, window=4, watermark=0).can_admit(Need(prompt)) is Fit.NEVER
    chunked = window_manager(12, window=4, watermark=0, max_step_tokens=4)
    assert chunked.can_admit(Need(prompt)) is Fit.OK
    chunked.add(0, 0)
    for start in range(0, prompt, 4):
        end = min(prompt, start + 4)
        assert chunked.allocate(0, end, first_write=start) == []
        chunked.commit(0, list(range(prompt)), end)


def test_every_group_needs_a_page_of_its_own():
    assert window_manager(1, watermark=0).can_admit(Need(1)) is Fit.NEVER
    assert window_manager(2, watermark=0).can_admit(Need(1)) is Fit.OK


@pytest.mark.parametrize("watermark", [-0.1, 1, 2.5])
def test_the_watermark_is_a_share(watermark):
    with pytest.raises(ValueError, match=f"watermark={watermark}"):
        full_manager(watermark=watermark)


def test_sequences_that_share_a_part_have_the_rest_for_themselves():
    manager = full_manager(10, 4, watermark=0)
    assert manager.can_admit(Need(16, num_seqs=4, prompt_tokens=11)) is Fit.OK  # 2 shared blocks and 2 of each
    assert manager.can_admit(Need(17, num_seqs=4, prompt_tokens=11)) is Fit.NEVER


def test_what_others_have_yet_to_take_counts_as_taken():
    manager = full_manager(10, 4, watermark=0)
    manager.add(0, 0)
    manager.allocate(0, 8, first_write=0)
    assert manager.outstanding(0, 21) == [4]
    assert manager.can_admit(Need(16), reserved=[4]) is Fit.OK
    assert manager.can_admit(Need(17), reserved=[4]) is Fit.LATER


def test_a_window_has_yet_to_take_what_it_does_not_hold_already():
    manager = window_manager(20, window=4, max_step_tokens=4)
    manager.add(0, 0)
    assert manager.outstanding(0, 30) == [15, 4]  # 3 tokens read back and 4 of a step
    manager.allocate(0, 4, first_write=0)
    manager.commit(0, list(range(30)), 4)
    assert manager.outstanding(0, 30) == [13, 2]


def test_relief_counts_a_block_once_all_its_owners_would_go():
    manager = full_manager(10, 4, watermark=0)
    manager.add(0, 0)
    manager.allocate(0, 32, first_write=0)
    manager.fork(0, 1)
    estimate = manager.reclaim_estimate()
    estimate.add_sequence(0)
    assert manager.can_admit(Need(12), reclaimed=estimate) is Fit.LATER
    estimate.add_sequence(1)
    assert manager.can_admit(Need(40), reclaimed=estimate) is Fit.OK
    assert manager.can_admit(Need(12)) is Fit.LATER, "nothing was freed"
