"""Places of adapters among those of a step: each keeps its own as long as it can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.execution.batch import AdapterPlaces

A, B, C, D = (letter.encode() for letter in "ABCD")


def test_an_adapter_stays_where_it_was_and_the_one_of_longest_ago_makes_room():
    places = AdapterPlaces(3)
    assert places.of([B, A, B]) == {B: 0, A: 1}
    assert places.of([A, C]) == {A: 1, C: 2}
    assert places.of([D]) == {D: 0}, "B was used longest ago"
    assert places.of([B, D]) == {B: 1, D: 0}
    assert places.of([]) == {}


def test_a_step_with_more_adapters_than_places_is_refused():
    places = AdapterPlaces(2)
    with pytest.raises(RuntimeError, match="a step has 3 different adapters, more than max_loras=2"):
        places.of([A, B, C])
    assert places.of([C, A]) == {C: 0, A: 1}


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 6), max_size=8), max_size=20))
def test_no_two_adapters_of_a_step_share_a_place_and_one_that_was_in_the_step_before_does_not_move(number, steps):
    places, before = AdapterPlaces(number), {}
    for step in steps:
        digests = [bytes([one]) for one in dict.fromkeys(step)][:number]
        now = places.of(digests)
        assert sorted(now) == sorted(digests)
        assert len(set(now.values())) == len(now) and all(0 <= place < number for place in now.values())
        assert all(now[digest] == before[digest] for digest in now if digest in before)
        before = now
