"""The rows of a batch as a TPU's launches of attention read queries and write results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from thorough import examples

from pallas_kernels.paged_attention.tpu_units import BLOCK_ROWS, Tile, in_chunks, in_rows, write_side_by_side


@settings(max_examples=examples(30), deadline=None)
@given(
    tokens=st.integers(1, 70),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    tile=st.sampled_from([Tile(1, 1), Tile(1, 4), Tile(8, 1), Tile(16, 2)]),
)
def test_rows_that_were_cut_into_chunks_are_put_back(tokens, kv_heads, group, tile):
    q = np.random.default_rng(tokens).normal(size=(tokens, kv_heads, group, 2)).astype(np.float32)

    @jax.jit
    def cut_and_put_back(q):
        chunks = in_chunks(q, tile)
        return chunks, in_rows(chunks, tile, group)

    chunks, rows = map(np.asarray, cut_and_put_back(q))
    assert chunks.shape == (-(-tokens // tile.tokens) * tile.chunks, kv_heads, group * tile.chunk, 2)
    np.testing.assert_array_equal(rows[:tokens], q)
    where, place = divmod(tokens - 1, tile.chunk)
    np.testing.assert_array_equal(chunks[where, :, place :: tile.chunk], q[-1])


@pytest.mark.parametrize("places", [1, BLOCK_ROWS])
def test_heads_of_a_token_lie_side_by_side_and_rows_that_are_not_ones_own_stay(places):
    """A decode's one row goes to the place that is its own, a chunk's rows each to theirs."""
    heads, group, lanes = 2, 3, 128
    before = np.random.default_rng(0).normal(size=(2 * BLOCK_ROWS, heads * group * lanes)).astype(np.float32)
    result = np.random.default_rng(1).normal(size=(heads, group * places, lanes)).astype(np.float32)
    own = np.arange(BLOCK_ROWS) == 5 if places == 1 else (np.arange(BLOCK_ROWS) > 2) & (np.arange(BLOCK_ROWS) < 9)

    def kernel(held, result, own, out):
        out[...] = held[...]
        write_side_by_side(out, pl.ds(BLOCK_ROWS, BLOCK_ROWS), result[...], own[...] != 0, places)

    shape = jax.ShapeDtypeStruct(before.shape, jnp.float32)
    got = pl.pallas_call(kernel, out_shape=shape, interpret=True)(before, result, own[:, None].astype(np.int32))
    want = before.copy()
    of_rows = np.moveaxis(result.reshape(heads * group, places, lanes), 0, 1).reshape(places, -1)
    want[BLOCK_ROWS:][own] = of_rows if places == 1 else of_rows[own]
    np.testing.assert_array_equal(got, want)
