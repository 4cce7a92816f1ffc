"""Heads of recurrent layers, and what several of them share, in the columns of one projection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged_models.recurrent.slots import Slots, columns, rows

WIDTH = 3


@st.composite
def layouts(draw):
    shared, each, shards = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 8))
    return Slots.of(shared * each, shared, shards, "heads"), shards


@given(layouts())
def test_every_shard_has_whole_slots_and_every_head_one_place(layout):
    slots, shards = layout
    assert slots.number % shards == 0
    places = [head for heads in slots.layout.q_of_slot for head in heads if head >= 0]
    assert sorted(places) == list(range(slots.heads))
    assert slots.placed_heads == slots.number * slots.share


@given(layouts())
def test_heads_lie_in_the_slots_of_what_they_share(layout):
    slots, _ = layout
    by_head, by_shared = slots.of_heads(1), slots.of_shared(1)
    each = slots.heads // slots.shared
    for heads, (shared,) in zip(by_head.first, by_shared.first, strict=True):
        assert all(head // each == shared for head in heads if head >= 0)


@given(layouts())
def test_columns_are_the_rows_of_their_heads_and_zero_beyond(layout):
    slots, _ = layout
    heads = np.arange(1, slots.heads + 1).repeat(WIDTH)[:, None] * np.ones(4, np.float32)
    shared = -np.arange(1, slots.shared + 1)[:, None] * np.ones(4, np.float32)
    stored = np.concatenate([heads, shared])
    placed = np.asarray(columns(slots.of_heads(WIDTH), slots.of_shared(1, start=len(heads)))(stored))
    assert placed.shape == (4, slots.placed_heads * WIDTH + slots.number)
    by_slot = placed[0].reshape(slots.number, -1)
    for found, of_heads, of_shared in zip(by_slot, slots.layout.q_of_slot, slots.layout.kv_of_slot, strict=True):
        np.testing.assert_array_equal(found[:-1].reshape(-1, WIDTH)[:, 0], [head + 1 for head in of_heads])
        assert found[-1] == -(of_shared + 1)


@given(layouts())
def test_heads_stored_by_what_they_share_go_where_those_stored_in_order_go(layout):
    slots, _ = layout
    each = slots.heads // slots.shared
    in_order = np.arange(1.0, slots.heads + 1)
    shared = np.arange(101.0, 101 + slots.shared)
    together = np.concatenate([[key, *values] for key, values in zip(shared, in_order.reshape(-1, each), strict=True)])
    apart = rows(slots.of_shared(1), slots.of_heads(1, tensor=1))(shared, in_order)
    fused = rows(slots.of_shared_by_shared(1, 0, 1 + each), slots.of_heads_by_shared(1, 1, 1 + each))(together)
    np.testing.assert_array_equal(np.asarray(fused), np.asarray(apart))


def test_heads_that_do_not_divide_are_refused_by_the_names_of_the_fields():
    with pytest.raises(ValueError, match="num_heads and n_groups: 6 heads do not divide over 4"):
        Slots.of(6, 4, 1, "num_heads and n_groups")
