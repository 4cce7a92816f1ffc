"""Places on several axes are those that walking over the prompt gives, wherever a chunk is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.scheduling.axis_positions import AxisPositions, axis_positions
from jpaged.scheduling.inputs import PromptItem


def item(start, length, advance=None, offsets=None, **more):
    return PromptItem(start, length, b"", length, {}, False, advance=advance, offsets=offsets, **more)


@st.composite
def prompts(draw):
    """(items, tokens of the prompt): text and items of grids, of squares that text has positions for, and of none."""
    items, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        at += draw(st.integers(0, 3))
        height, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        kind = draw(st.sampled_from(["grid", "plain", "still"]))
        offsets = np.indices((1, height, width), np.int32).reshape(3, -1).T if kind == "grid" else None
        advance = {"grid": max(height, width), "plain": None, "still": 0}[kind]
        items.append(item(at, height * width, advance, offsets))
        at += height * width
    return items, at + draw(st.integers(0, 3))


def walked(items, stop):
    """The places, token by token."""
    places, moved = [], 0
    for position in range(stop):
        for each in items:
            if position == each.stop and each.advance is not None:
                moved += each.advance - each.length
        inside = [each for each in items if each.start <= position < each.stop]
        place = np.full(3, position + moved)
        if inside and inside[0].offsets is not None:
            place = inside[0].start + moved + inside[0].offsets[position - inside[0].start]
        places.append(place)
    return np.array(places).reshape(-1, 3)


@given(prompts(), st.data())
def test_any_chunk_has_the_places_of_a_walk_over_the_whole(prompt, data):
    items, length = prompt
    places = axis_positions(items)
    if places is None:
        assert all(each.offsets is None for each in items)
        return
    whole = walked(items, length + 4)
    start = data.draw(st.integers(0, length + 3))
    stop = data.draw(st.integers(start, length + 4))
    assert places.of(start, stop).tolist() == whole[start:stop].tolist()
    assert places.of(length + 3, length + 4).tolist() == [[length + 3 + places.moved] * 3]


def test_a_picture_moves_text_by_its_longer_side():
    grid = np.indices((1, 2, 5), np.int32).reshape(3, -1).T
    places = AxisPositions([item(3, 10, 5, grid)])
    assert places.of(2, 5).tolist() == [[2, 2, 2], [3, 3, 3], [3, 3, 4]]
    assert places.of(12, 14).tolist() == [[3, 4, 7], [8, 8, 8]]
    assert places.moved == -5


def test_items_on_different_numbers_of_axes_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 3\] axes"):
        AxisPositions([item(0, 1, 1, np.zeros((1, 3), int)), item(2, 1, 1, np.zeros((1, 2), int))])
