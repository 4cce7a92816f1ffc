"""Work lists of the TPU kernel: every query of the sequences that are taken lies in exactly one unit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from pallas_kernels.paged_attention import Tuning
from pallas_kernels.paged_attention.reference import Reach
from pallas_kernels.paged_attention.tpu_plan import chip_of, tile_of_batch, tuning_of
from pallas_kernels.paged_attention.tpu_units import Units, cut_into_units, max_units, visit_all_tiles

BLOCK, PAGES, SEQS = 16, 8, 8
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=SEQS)


@partial(jax.jit, static_argnames=("tile", "tiles", "units"))
def cut(starts, kv_lens, lengths, **sizes):
    """Cut a batch of whole tables, by a program for each of its few sizes: compiling takes most of the time."""
    none_broken = jnp.zeros(len(lengths), jnp.int32)
    return cut_into_units(
        starts,
        kv_lens,
        none_broken,
        lengths > 1,
        **sizes,
        reach=Reach(),
        pages=PAGES,
        block_size=BLOCK,
        whole_tables=True,
    )


visit = jax.jit(visit_all_tiles, static_argnums=1)


def batch_of(lengths, spare, least=1):
    """Queries of each sequence, places of the first ones, and rows of the batch: of few sizes, one or all sequences."""
    lengths = np.asarray(lengths + [0] * ((SEQS if len(lengths) > 1 else 1) - len(lengths)), np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = max(least, int(starts[-1]) + spare)
    return lengths, starts, next(size for size in (1, 2, 7, 24, 50, 111, 200) if size >= tokens)


@settings(max_examples=examples(100), deadline=None)
@given(
    lengths=LENGTHS,
    spare=st.integers(0, 9),
    tile=st.sampled_from([1, 2, 8, 32]),
)
def test_units_hold_each_query_of_a_prompt_once_and_are_never_too_many(lengths, spare, tile):
    lengths, starts, tokens = batch_of(lengths, spare)
    bound = max_units(tokens, len(lengths), tile)
    work = cut(starts, lengths + 7, lengths, tile=tile, tiles=-(-tokens // tile), units=bound)
    units = Units(*np.asarray(work))
    live = int(units.num_units[0])
    assert live <= bound
    assert (np.diff(units.tile[:live]) >= 0).all()
    found = []
    for u in range(live):
        rows = np.arange(units.first[u], units.stop[u]) + units.tile[u] * tile
        found += rows.tolist()
        seq = units.seq[u]
        assert ((rows >= starts[seq]) & (rows < starts[seq + 1])).all()
        positions = units.query_pos[u] + np.arange(units.first[u], units.stop[u])
        np.testing.assert_array_equal(positions, 7 + rows - starts[seq])
        assert units.key_stop[u] == positions[-1] + 1
    want = [row for s, n in enumerate(lengths) if n > 1 for row in range(starts[s], starts[s + 1])]
    assert found == want


@settings(max_examples=examples(100), deadline=None)
@given(
    lengths=LENGTHS,
    spare=st.integers(0, 40),
    tile=st.sampled_from([16, 32]),
)
def test_each_tile_is_visited_once_whether_or_not_a_prompt_lies_in_it(lengths, spare, tile):
    lengths, starts, tokens = batch_of(lengths, spare, least=tile)
    tiles = -(-tokens // tile)
    work = cut(starts, lengths, lengths, tile=tile, tiles=tiles, units=max_units(tokens, len(lengths), tile))
    visited = visit(work, tiles)
    of_tile, number = np.asarray(Units(*visited).tile), int(visited[0, 0])
    runs = of_tile[np.concatenate([[True], np.diff(of_tile) != 0])]
    assert sorted(runs) == list(range(tiles))
    np.testing.assert_array_equal(visited[:, :number], work[:, :number])


@settings(deadline=None)
@given(
    tokens=st.integers(1, 5000),
    q_per_kv=st.integers(1, 200),
    dtype=st.sampled_from(["bfloat16", "int8"]),
    sizes=st.sampled_from([(128, 512), (256, 1024), (16, 16)]),
)
def test_tiles_are_powers_of_two_within_their_tuning(tokens, q_per_kv, dtype, sizes):
    tuning = Tuning(product_rows=sizes[0], tile_rows=sizes[1])
    tile = tile_of_batch(tokens, None, q_per_kv, jnp.dtype(dtype), tuning)
    rows = q_per_kv * (2 if dtype == "int8" else 1)
    assert tile.chunk.bit_count() == tile.chunks.bit_count() == 1
    assert tile.chunk * rows <= sizes[0] or tile.chunk == 1
    assert tile.tokens * rows <= sizes[1] or tile.tokens == 1
    assert tile.tokens < 2 * tokens


def test_an_unknown_chip_runs_with_the_smallest_sizes_which_is_logged_and_no_figure_is_given_for_it(caplog):
    assert tuning_of("TPU v9", 8, 128) == tuning_of("TPU v5 lite", 8, 128)
    assert "device_kind='TPU v9' names none of the TPUs" in caplog.text
    with pytest.raises(ValueError, match=r"device_kind='TPU v9'.* v5e, v5p, v6e, tpu7x"):
        chip_of("TPU v9")


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v4", "TPU v4 lite"])
def test_a_tpu_that_cannot_hold_the_kernels_is_refused(kind):
    """libtpu refuses them for a v4: "Used 17.37M of 16.00M vmem"."""
    with pytest.raises(ValueError, match=f"device_kind='{kind}' has 16 MiB of VMEM, less than the kernels need"):
        tuning_of(kind, 8, 128)


def test_a_chip_that_reads_faster_has_more_in_flight():
    v5e, v6e, tpu7x = (tuning_of(kind, 8, 128) for kind in ("TPU v5 lite", "TPU v6 lite", "TPU7x"))
    assert v5e.flight_bytes < v6e.flight_bytes < tpu7x.flight_bytes == 16 * 2**20
    assert tuning_of("cpu", 8, 128) == v5e
    assert tuning_of("TPU v5p", 8, 256).tile_rows < tuning_of("TPU v5", 8, 128).tile_rows
