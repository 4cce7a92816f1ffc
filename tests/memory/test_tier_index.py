"""Places on disk: within the bound, none overlapping, what was needed last found longest."""

from __future__ import annotations

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


@settings(max_examples=examples(300), deadline=None)
@given(
    num_pages=st.integers(0, 5),
    sizes=st.sampled_from([[6], [3, 2], [6, 1], [1, 2, 3]]),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "touch", "forget", "clear"]), st.integers(0, 2), st.integers(0, 40)
        )
    ),
)
def test_places_never_overlap_and_the_newest_block_is_there(num_pages, sizes, moves):
    index = TierIndex(sizes, 6, num_pages)
    for what, g, number in moves:
        g %= len(sizes)
        stored = index.find(g, link(number))
        if what == "put":
            made = index.put(g, link(number))
            assert (made is None) == (stored is not None or not num_pages)
            assert index.find(g, link(number)) == (made or stored)
        elif what == "clear":
            if number == 0:
                index.clear()
                assert len(index) == 0
        elif stored is not None:
            index.touch(stored) if what == "touch" else index.forget(stored)
            assert (index.find(g, link(number)) is None) == (what == "forget")
        index.check()
        assert index.num_bytes <= 6 * num_pages
