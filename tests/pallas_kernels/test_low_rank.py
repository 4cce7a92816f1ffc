"""Both ways to add low-rank products agree with the row-by-row reference, and rows do not meet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.low_rank import AdaptedMatrix, low_rank_at_once, low_rank_in_turn, low_rank_reference

ROWS, INPUTS, RANK, OUTPUTS, ADAPTERS = 13, 24, 4, 40, 3


def operands(seed: int = 0):
    random = np.random.default_rng(seed)
    x, down, up = (
        random.normal(size=shape).astype(np.float32)
        for shape in ((ROWS, INPUTS), (ADAPTERS, RANK, INPUTS), (ADAPTERS, RANK, OUTPUTS))
    )
    return x, down, up, random.integers(-1, ADAPTERS, ROWS).astype(np.int32)


def presence(place):
    return np.array([adapter in place for adapter in range(ADAPTERS)])


@pytest.mark.parametrize("seed", range(3))
def test_both_ways_agree_with_the_reference(seed: int):
    x, down, up, place = operands(seed)
    expected = low_rank_reference(x, down, up, place)
    np.testing.assert_allclose(low_rank_in_turn(x, down, up, place, presence(place)), expected, atol=2e-5)
    np.testing.assert_allclose(low_rank_at_once(x, down, up, place), expected, atol=2e-5)
    assert not np.asarray(expected)[place < 0].any()


def test_in_turn_a_rows_bits_depend_neither_on_its_place_nor_on_other_rows():
    x, down, up, place = operands()
    together = np.asarray(jax.jit(low_rank_in_turn)(x, down, up, place, presence(place)))
    order = np.array([2, 0, 1])
    moved = np.where(place >= 0, np.argsort(order)[place], -1).astype(np.int32)
    swapped = np.asarray(jax.jit(low_rank_in_turn)(x, down[order], up[order], moved, presence(moved)))
    np.testing.assert_array_equal(together, swapped)
    only = np.where(place == 1, 1, -1).astype(np.int32)
    alone = np.asarray(jax.jit(low_rank_in_turn)(x, down, up, only, presence(only)))
    np.testing.assert_array_equal(alone[place == 1], together[place == 1])


@pytest.mark.parametrize("branches", [False, True])
def test_one_of_several_layers_is_read_where_a_matrix_says_so(branches: bool):
    x, down, up, place = operands()
    stacked = AdaptedMatrix(None, jnp.stack([down * 0, down]), jnp.stack([up, up]), place, presence(place), 0, branches)
    assert not stacked.addition(x).any()
    np.testing.assert_allclose(stacked.of_layer(None, 1).addition(x), low_rank_reference(x, down, up, place), atol=2e-5)
