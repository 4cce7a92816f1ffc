"""Block copies: every implementation against NumPy, the TPU kernel without races."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples
from tpu_interpreter import run_recording_races

from pallas_kernels.block_copy import block_copy, tpu

IMPLS = ["reference", "xla", "tpu_interpret"]
BLOCKS, PAIRS = 9, 10


@cache
def compiled(impl):
    return jax.jit(partial(block_copy, impl=impl))


def blocks_of(dtype="float32"):
    return jnp.arange(BLOCKS * 3 * 2 * 8 * 128).reshape(BLOCKS, 3, 2, 8, 128).astype(dtype)


def padded(ids):
    return jnp.asarray(ids + [-1] * (PAIRS - len(ids)), jnp.int32)


def copied(blocks, src, dst):
    want = np.array(blocks)
    for s, d in zip(src, dst, strict=True):
        if 0 <= s < BLOCKS and 0 <= d < BLOCKS:
            want[d] = np.asarray(blocks)[s]
    return want


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_copies_read_before_they_write_and_out_of_range_pairs_are_dropped(impl, data):
    dst = data.draw(st.lists(st.integers(-1, BLOCKS), max_size=PAIRS, unique=True))
    src = data.draw(st.lists(st.integers(-2, BLOCKS + 1), min_size=len(dst), max_size=len(dst)))
    blocks = blocks_of()
    got = compiled(impl)(blocks, padded(src), padded(dst))
    np.testing.assert_array_equal(got, copied(blocks, src, dst))


@pytest.mark.parametrize("impl", IMPLS)
def test_whole_views_of_bfloat16_copy_too(impl):
    blocks = blocks_of("bfloat16").reshape(BLOCKS, 3, 1, 1, 16, 128)
    got = compiled(impl)(blocks, padded([0, 1]), padded([5, 6]))
    np.testing.assert_array_equal(got, copied(blocks, [0, 1], [5, 6]))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        pytest.param([0, 1, 0, 2], [4, 5, 6, 7], id="distinct blocks, all copies in flight"),
        pytest.param([0, 1, 2, 3], [1, 2, 3, 0], id="a cycle"),
        pytest.param([-1, 3, BLOCKS], [-1, 4, 2], id="padding"),
        pytest.param([], [], id="nothing to copy"),
    ],
)
def test_the_tpu_kernel_has_no_race(src, dst):
    blocks = blocks_of()
    got, races = run_recording_races(tpu.block_copy, blocks, padded(src), padded(dst))
    assert not races
    np.testing.assert_array_equal(got, copied(blocks, src, dst))


def test_the_tpu_kernel_refuses_what_its_memory_cannot_stage():
    many = jnp.zeros(tpu.STAGING_BYTES // (8 * 128 * 4) + 1, jnp.int32)
    with pytest.raises(ValueError, match=str(tpu.STAGING_BYTES)):
        tpu.block_copy(blocks_of(), many, many, interpret=True)


def test_slices_too_large_to_stage_are_cut_by_whole_tiles(monkeypatch):
    assert tpu._rows_of_slice(2304, 16, 2304) == 2304
    assert tpu._rows_of_slice(2304, 16, 1000) == 768
    assert tpu._rows_of_slice(24, 8, 8) == 8 and tpu._rows_of_slice(24, 16, 8) == 24, "no whole tiles divide it"
    monkeypatch.setattr(tpu, "STAGING_BYTES", PAIRS * 8 * 128 * 4)
    blocks = blocks_of().reshape(BLOCKS, 2, 24, 128)
    got = tpu.block_copy(blocks, padded([0, 1, 2]), padded([1, 2, 0]), interpret=True)
    np.testing.assert_array_equal(got, copied(blocks, [0, 1, 2], [1, 2, 0]))
