"""Places on disk: within the bound, none overlapping, what was needed last found longest."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.memory.hash_chain import Link
from jpaged.memory.tiers import TierIndex


def link(number: int) -> Link:
    return Link(number.to_bytes(16, "little"), bytes([number]))


def test_a_block_is_found_by_digest_and_tokens():
    index = TierIndex([4], 4, 10)
    stored = index.put(0, link(1))
    assert index.find(0, link(1)) == stored and stored.place == 0 and stored.num_bytes == 4
    assert index.find(0, link(1)._replace(tokens=b"other")) is None
    assert index.find(0, link(2)) is None and index.put(0, link(1)) is None


def test_blocks_of_two_groups_lie_in_pages_of_their_own():
    index = TierIndex([3, 2], 6, 2)
    places = [index.put(g, link(number)).place for number, g in enumerate((0, 1, 0, 1, 1))]
    assert places == [0, 6, 3, 8, 10]
    index.check()


def test_the_page_that_was_needed_least_recently_is_given_up_whole():
    index = TierIndex([2], 4, 2)
    first, second, third, _ = (index.put(0, link(number)) for number in range(4))
    index.touch(first)
    assert index.put(0, link(4)).place == third.place
    assert [index.find(0, link(number)) is not None for number in range(5)] == [True, True, False, False, True]
    assert index.num_bytes == 8 and second is not None


def test_without_room_for_a_page_nothing_is_kept():
    assert TierIndex([2], 4, 0).put(0, link(1)) is None


def test_what_was_forgotten_has_another_place():
    index = TierIndex([2], 2, 3)
    stored = index.put(0, link(1))
    index.forget(stored)
    assert index.find(0, link(1)) is None and len(index) == 0
    again = index.put(0, link(1))
    index.forget(stored)  # the newer one stays
    assert index.find(0, link(1)) == again != stored


def salted(number: int, tenant: int) -> Link:
    return link(number)._replace(tenant=bytes([tenant]) if tenant else b"")


def found(index: TierIndex, *numbers: int, g: int = 0) -> list[int]:
    return [number for number in numbers if index.find(g, link(number)) is not None]


def test_pages_of_a_low_priority_are_dropped_first_and_of_a_high_one_last():
    index = TierIndex([2], 4, 3)
    for number, level in enumerate((65, 65, 0, 0, -35, -35)):
        index.put(0, link(number), level)
    for number in range(6, 12):
        index.put(0, link(number))
        index.check()
    assert found(index, *range(12)) == [0, 1, 8, 9, 10, 11]


def test_a_block_below_the_default_takes_no_place_of_a_higher_priority():
    index = TierIndex([2], 4, 1)
    assert index.put(0, link(0), -1) is not None and index.put(0, link(1), -2) is None
    assert index.put(0, link(2), -1) is not None and index.put(0, link(3), -1) is not None
    assert found(index, 0, 2, 3) == [3]


def test_a_small_tiers_open_part_has_a_page_for_each_group():
    index = TierIndex([4, 4, 4], 4, 8)
    for number in range(8):
        index.put(number % 3, link(number), 5)
    for g in range(3):
        assert index.put(g, link(10)) is not None
    assert [index.find(g, link(10)) is not None for g in range(3)] == [True] * 3
    index.check()


@pytest.mark.parametrize("restarted", [False, True])
def test_an_eighth_of_a_tier_is_open_to_the_default_where_priorities_without_an_end_fill_it(restarted):
    index = TierIndex([2], 4, 16)
    high = [index.put(0, link(number), 5) for number in range(32)]
    if restarted:
        index = TierIndex([2], 4, 16)
        index.load(high)
    for number in range(32, 64):
        assert index.put(0, link(number)) is not None
        index.check()
    assert found(index, *range(64)) == [*range(4, 32), *range(60, 64)], "the last two pages of the default"
    for number in range(64, 96):
        index.put(0, link(number), 5)
    assert found(index, *range(32, 96)) == list(range(64, 96)), "a high priority takes them back first"
    assert index.put(0, link(96)) is not None


def test_a_priority_ends_with_the_latest_of_its_pages_blocks():
    index = TierIndex([2], 4, 2)
    index.put(0, link(0), 10, 5.0)
    index.put(0, link(1), 10, 9.0)
    index.put(0, link(2))
    for now, left in ((6.0, [0, 1]), (9.0, [])):
        index.end_levels(now)
        for number in range(3, 6):
            index.put(0, link(number + int(now) * 10))
        index.check()
        assert found(index, 0, 1) == left
    forever = TierIndex([2], 4, 1)
    forever.put(0, link(0), 10)
    forever.put(0, link(1), 10, 5.0)
    forever.end_levels(6.0)
    forever.check()
    assert forever.put(0, link(2), 10) is not None


def test_a_page_whose_priority_ended_is_taken_in_with_what_was_put_into_it_later():
    index = TierIndex([2], 4, 1)
    kept = index.put(0, link(0), 5, 10.0)
    index.end_levels(11.0)
    blocks = [kept, kept._replace(digest=link(1).digest, tokens=link(1).tokens, place=2, level=0, until=math.inf)]
    again = TierIndex([2], 4, 2)
    again.load(blocks)
    assert found(again, 0, 1) == [0, 1]
    again.end_levels(11.0)
    for number in range(2, 6):
        again.put(0, link(number))
    again.check()
    assert found(again, 0, 1) == [], "the page is not kept for good"


@pytest.mark.parametrize("page", [2, 4])
def test_a_salt_over_its_limit_loses_its_own_blocks_and_no_page_of_others(page):
    index = TierIndex([2], page, 24 // page, salt_bytes=8)
    for number in range(4):
        index.put(0, salted(number, 0))
    for number in range(10, 40):
        index.put(0, salted(number, 1))
        index.check()
    assert found(index, *range(4)) == [0, 1, 2, 3]
    assert found(index, *range(10, 40)) == [36, 37, 38, 39][-len(found(index, *range(10, 40))) :]
    index.put(0, salted(50, 2))
    index.check()
    assert found(index, 0, 1, 2, 3, 39, 50) == [0, 1, 2, 3, 39, 50]


def test_what_a_salt_needed_last_stays_of_it():
    index = TierIndex([2], 2, 9, salt_bytes=6)
    blocks = [index.put(0, salted(number, 1)) for number in range(3)]
    index.touch(blocks[0])
    index.put(0, salted(3, 1))
    assert found(index, *range(4)) == [0, 2, 3]
    assert TierIndex([8], 8, 9, salt_bytes=6).put(0, salted(1, 1)) is None


def test_a_list_of_blocks_in_places_that_were_used_again_is_taken_in():
    index, written = TierIndex([2], 6, 3, salt_bytes=6), []
    for number in range(12):
        stored = index.put(0, salted(number, number % 2))
        written.append(stored)
    again = TierIndex([2], 6, 3)
    again.load(written)
    again.check()
    live = [number for number in range(12) if index.find(0, link(number)) is not None]
    assert set(live) <= set(found(again, *range(12)))


@settings(max_examples=examples(300), deadline=None)
@given(
    num_pages=st.integers(0, 5),
    sizes=st.sampled_from([[6], [3, 2], [6, 1], [1, 2, 3]]),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "touch", "forget", "clear", "end"]),
            st.integers(0, 2),
            st.integers(0, 40),
        )
    ),
    limit=st.sampled_from([None, 6, 12]),
    ranked=st.booleans(),
)
def test_places_never_overlap_and_the_newest_block_is_there(num_pages, sizes, moves, limit, ranked):
    index = TierIndex(sizes, 6, num_pages, salt_bytes=limit)
    for now, (what, g, number) in enumerate(moves):
        g %= len(sizes)
        stored = index.find(g, link(number))
        if what == "put":
            level = (number % 3 - 1) * ranked
            made = index.put(g, salted(number, number % 4), level, now + 4 if number % 2 else math.inf)
            assert made is None or stored is None
            assert made is not None or stored is not None or not num_pages or ranked or limit is not None
            assert index.find(g, link(number)) == (made or stored)
        elif what == "end":
            index.end_levels(now)
        elif what == "clear":
            if number == 0:
                index.clear()
                assert len(index) == 0
        elif stored is not None:
            index.touch(stored) if what == "touch" else index.forget(stored)
            assert (index.find(g, link(number)) is None) == (what == "forget")
        index.check()
        assert index.num_bytes <= 6 * num_pages
