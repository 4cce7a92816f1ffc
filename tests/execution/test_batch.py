"""The arrays of hand-made steps."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.execution import Bucket
from jpaged.execution.batch import BatchBuilder, empty_batch
from jpaged.execution.caches.adapters import AdapterPlaces
from jpaged.execution.caches.base import BlockSettings, LayerCache
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.caches.registry import layer_caches
from jpaged.model_api import AttentionGroup
from jpaged.pyramid_kv import PyramidKV
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Chunk, Request, Sample, ScheduledStep, Sequence


def block_format(block_size: int) -> BlockSettings:
    return BlockSettings(block_size, jnp.dtype("float32"), 1)


def builder_of(*caches: LayerCache) -> BatchBuilder:
    """12 blocks of every group in the pool, 4 sequences of 16 tokens."""
    page = PoolSpec.plan(caches, 1 << 20).layout.page_bytes
    return BatchBuilder(PoolSpec.plan(caches, 12 * page), max_num_seqs=4, max_model_len=16)


def builder() -> BatchBuilder:
    """Two groups, blocks of 4 and of 2 tokens, all of one size."""
    (full,) = layer_caches([AttentionGroup("full", (0,), 1, 64)], block_format(4))
    (window,) = layer_caches([AttentionGroup("window", (1, 2), 1, 64, sliding_window=4)], block_format(2))
    return builder_of(full, window)


def sequence(tokens: list[int], row: int, num_prompt: int | None = None) -> Sequence:
    return Sequence(row + 100, 0, tokens, len(tokens) if num_prompt is None else num_prompt, row=row)


def request(seq: Sequence) -> Request:
    return Request(0, seq.token_ids, SamplingParams(), 0, 16, frozenset(), frozenset(), [seq])


@pytest.fixture
def mixed():
    """A decode whose token is on the device, a decode the host knows, and a prefill chunk; padded to 10 tokens."""
    a, b, c = sequence([10, 11, 12], 2), sequence([20, 21], 0), sequence([30, 31, 32, 33, 34, 35, 36], 1)
    chunks = [
        Chunk(a, 3, 1, 5, [[7], [3, 4]]),
        Chunk(b, 1, 1, -1, [[1], [0]]),
        Chunk(c, 2, 5, -1, [[9, 2], [-1, 6, 5, 1]]),
    ]
    step = ScheduledStep(chunks, [Sample(request(c), c, chunks[2]), Sample(request(a), a, chunks[0])])
    return builder().build(step, Bucket(10, 4, False))


def test_tokens_are_the_hosts_or_rows_of_the_last_step(mixed):
    assert mixed.tokens.tolist() == [0, 21, 32, 33, 34, 35, 36, 0, 0, 0]
    assert mixed.source_rows.tolist() == [5] + [-1] * 9


def test_query_starts_positions_and_lengths(mixed):
    assert mixed.query_starts.tolist() == [0, 1, 2, 7, 7]
    assert mixed.positions.tolist() == [3, 1, 2, 3, 4, 5, 6, 0, 0, 0]
    assert mixed.kv_lens.tolist() == [4, 2, 7, 0]


def test_tables_and_write_slots_of_every_group(mixed):
    (full, full_slots, last), (window, window_slots, _) = mixed.caches
    assert last is None
    assert full.tolist() == [[7, -1, -1, -1], [1, -1, -1, -1], [9, 2, -1, -1], [-1] * 4]
    assert window[2].tolist() == [-1, 6, 5, 1, -1, -1, -1, -1]
    assert full_slots.tolist() == [31, 5, 38, 39, 8, 9, 10] + [48] * 3
    assert window_slots.tolist() == [9, 1, 12, 13, 10, 11, 2] + [24] * 3


def test_padding_is_out_of_range_so_that_it_is_written_nowhere(mixed):
    for arrays, size in zip(mixed.caches, (4, 2), strict=True):
        assert (arrays.slots[7:] == 12 * size).all()


def test_samples_start_from_their_chunks_last_row_in_the_samples_order(mixed):
    assert mixed.sample_at.tolist() == [6, 0, 0, 0]


def test_the_last_token_of_a_longer_chunk_can_be_on_the_device():
    a = sequence([10, 11, 12], 0)
    chunks = [Chunk(a, 1, 3, 2, [[0], [0, 1]])]
    batch = builder().build(ScheduledStep(chunks), Bucket(4, 4, False))
    assert batch.tokens.tolist() == [11, 12, 0, 0]
    assert batch.source_rows.tolist() == [-1, -1, 2, -1]


def test_tables_are_remembered_until_they_change():
    build, a = builder().build, sequence(list(range(10, 19)), 3)
    first = build(ScheduledStep([Chunk(a, 0, 4, -1, [[5, 6], [1, 2]])]), Bucket(4, 4, False))
    kept = build(ScheduledStep([Chunk(a, 3, 1, -1, None)]), Bucket(1, 1, True))
    assert kept.caches[0].table[0].tolist() == first.caches[0].table[0].tolist() == [5, 6, -1, -1]
    shorter = build(ScheduledStep([Chunk(a, 3, 1, -1, [[8], [-1, 3]])]), Bucket(1, 1, True))
    assert shorter.caches[0].table[0].tolist() == [8, -1, -1, -1]
    assert shorter.caches[0].slots.tolist() == [35]


@pytest.mark.parametrize("tables", [[[12], [0]], [[0], [12]], [[-2], [0]], [[0], [-7]]])
def test_a_block_id_outside_the_pool_is_an_error(tables):
    step = ScheduledStep([Chunk(sequence([1], 0), 0, 1, -1, tables)])
    with pytest.raises(RuntimeError, match=r"sequence 100: block ids .* are outside \[0, 12\)"):
        builder().build(step, Bucket(1, 1, True))


@pytest.mark.parametrize("tables", [[[-1], [0]], [[0], []]])
def test_a_token_without_a_block_is_an_error(tables):
    step = ScheduledStep([Chunk(sequence([1], 0), 0, 1, -1, tables)])
    with pytest.raises(RuntimeError, match="has no block to be written to"):
        builder().build(step, Bucket(1, 1, True))


def test_behind_a_prompt_that_a_group_cut_down_tokens_lie_as_many_slots_before_their_positions():
    """Two bands that keep 8 and 4 tokens of a prompt: one sequence is behind its 10, one ends its 6, one its 3."""
    budget = PyramidKV(budget=6, sinks=0, recent=2, window=2, beta=2.0)
    caches = layer_caches(budget.apply([AttentionGroup("full", (0, 1), 1, 64)]), block_format(2))
    build = builder_of(*caches).build
    chunks = [
        Chunk(sequence(list(range(12)), 0, num_prompt=10), 11, 1, -1, [[0, 1, 2, 3, 7], [4, 5, 6]]),
        Chunk(sequence(list(range(6)), 1), 4, 2, -1, [[4, 5, 6], [8, 9, 10]]),
        Chunk(sequence(list(range(3)), 2), 0, 3, -1, [[8, 9], [0, 1]]),
    ]
    batch = build(ScheduledStep(chunks), Bucket(8, 4, False))
    assert batch.positions.tolist() == [11, 4, 5, 0, 1, 2, 0, 0]
    assert batch.kv_lens.tolist() == [12, 6, 3, 0]
    (arrays,) = batch.caches
    assert arrays.dropped.tolist() == [[2, 0, 0, 0], [6, 0, 0, 0]]
    assert arrays.ending.tolist() == [1, -1, -1, -1], "a prompt of 3 tokens is kept whole by both"
    assert arrays.slots[0].tolist() == [7 * 2 + 1, 12, 13, 16, 17, 18, 24, 24]
    assert arrays.slots[1].tolist() == [6 * 2 + 1, 20, 21, 0, 1, 2, 24, 24]


def test_a_batch_without_tokens_is_padding_only():
    spec = PoolSpec.plan(layer_caches([AttentionGroup("full", (0,), 1, 64)], block_format(4)), 1 << 20)
    batch = empty_batch(Bucket(8, 4, False), spec, max_num_seqs=4, max_model_len=16)
    (arrays,) = batch.caches
    assert (arrays.table == -1).all() and (arrays.slots == spec.views[0][0] * 4).all()
    assert (batch.source_rows == -1).all() and not batch.kv_lens.any() and not batch.query_starts.any()


# Places of adapters among those of a step: each keeps its own as long as it can.

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


def tables(most: int) -> st.SearchStrategy[list[int]]:
    """Tables of at most so many blocks, of which the first is there."""
    return st.tuples(st.integers(0, 11), st.lists(st.integers(-1, 11), max_size=most - 1)).map(lambda t: [t[0], *t[1]])


@given(st.lists(st.tuples(st.integers(0, 2), tables(4), tables(8)), max_size=12))
def test_tables_may_change_in_any_way_from_step_to_step(changes):
    kept = builder()
    for row, *both in changes:
        chunk = Chunk(sequence([1], row), 0, 1, -1, both)
        batch = kept.build(ScheduledStep([chunk]), Bucket(1, 1, True))
        for cache, blocks, width in zip(batch.caches, both, (4, 8), strict=True):
            assert cache.table.tolist() == [blocks + [-1] * (width - len(blocks))]
