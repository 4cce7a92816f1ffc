"""The place of the largest product by a screen is that of all products: whatever the rows and the table, with ties, and
where numbers leave the range that the bounds hold for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from pallas_kernels.matmul import cpu as products
from pallas_kernels.row_ops import largest
from pallas_kernels.screened_argmax import abstract_screen, cpu, make_screen, reference, screened_argmax, screens
from pallas_kernels.screened_argmax.screen import LENGTH, LOST, OFFSET, SCALE

OUTPUTS, INPUTS = 1000, 64
needs_vnni = pytest.mark.skipif(not screens((OUTPUTS, INPUTS), jnp.float32, "cpu"), reason="this processor has no VNNI")
SHAPES = [(16, 16), (1000, 64), (77, 48), (1, 32), (5000, 576)]


def numbers(*shape, seed=0, spread=1.0):
    return (np.random.default_rng(seed).normal(size=shape) * spread).astype(np.float32)


screened = jax.jit(cpu.screened, static_argnames="most_listed")
places = jax.jit(partial(screened_argmax, impl="cpu"))
whole = jax.jit(lambda x, table: largest(products.matmul_table(x, table), impl="cpu")[0])


def assert_those_of_all_products(x, table):
    x, table = jnp.asarray(x), jnp.asarray(table)
    np.testing.assert_array_equal(places(x, table, make_screen(table)), whole(x, table))


@needs_vnni
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_places_are_those_of_all_products(shape, rows):
    assert_those_of_all_products(numbers(rows, shape[1]), numbers(*shape, seed=1))


@needs_vnni
def test_few_rows_of_the_table_are_multiplied():
    x, table = numbers(16, 576), numbers(5000, 576, seed=1)
    _, complete, tried = screened(x, table, make_screen(table))
    assert np.all(complete) and np.max(tried) < 250


@needs_vnni
@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    rows=st.integers(1, 12),
    spread=st.sampled_from([1e-9, 1e-3, 1.0, 1e3, 1e12]),
    outliers=st.integers(0, 6),
    share=st.floats(0, 1),
    norms=st.floats(0, 6),
    offset=st.sampled_from([0.0, 1.0, -5.0]),
)
def test_places_hold_for_any_rows_and_tables(seed, rows, spread, outliers, share, norms, offset):
    """Outliers among a row's numbers, tables whose rows differ in length by powers of ten, or lie close together."""
    rng = np.random.default_rng(seed)
    x = numbers(rows, INPUTS, seed=seed, spread=spread)
    x[:, rng.integers(0, INPUTS, outliers)] *= rng.choice([10.0, 100.0, 1e4], outliers).astype(np.float32)
    table = numbers(OUTPUTS, INPUTS, seed=seed + 1) * 10.0 ** rng.uniform(-norms / 2, norms / 2, (OUTPUTS, 1))
    table = np.float32(share) * table + np.float32(1 - share) * numbers(1, INPUTS, seed=seed + 2) + np.float32(offset)
    assert_those_of_all_products(x, table.astype(np.float32))


@needs_vnni
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 1 << 16), step=st.sampled_from([0.0, 1e-7, 1e-6, 1e-4]))
def test_the_first_of_several_largest_products_is_taken(seed, step):
    """Rows of the table stand several times there, or differ in the last bits."""
    rng = np.random.default_rng(seed)
    table = numbers(40, INPUTS, seed=seed)[rng.integers(0, 40, OUTPUTS)]
    table = (table * (1 + step * rng.integers(-2, 3, table.shape))).astype(np.float32)
    assert_those_of_all_products(numbers(9, INPUTS, seed=seed + 1), table)


@needs_vnni
@pytest.mark.parametrize("odd", [0.0, np.nan, np.inf, -np.inf, 1e30, 1e-30])
def test_rows_that_have_no_bounds_are_multiplied_with_all_rows_of_the_table(odd):
    x, table = numbers(11, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    x[3] = odd
    x[5, 7] = odd
    assert_those_of_all_products(x, table)


@needs_vnni
@pytest.mark.parametrize("odd", [0.0, np.nan, np.inf, -np.inf, 1e30, 1e-30, 1e-42])
def test_rows_of_the_table_that_have_no_bounds_are_multiplied(odd):
    x, table = numbers(11, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    table[100] = odd
    table[200, 7] = odd
    assert_those_of_all_products(x, table)
    assert_those_of_all_products(x, np.full_like(table, odd))


@needs_vnni
def test_all_are_multiplied_where_more_may_be_the_largest_than_are_listed():
    x, table = jnp.asarray(numbers(9, INPUTS)), jnp.asarray(numbers(OUTPUTS, INPUTS, seed=1))
    screen = make_screen(table)
    assert not np.all(screened(x, table, screen, most_listed=2)[1])
    few = jax.jit(partial(cpu.screened_argmax, most_listed=2))
    np.testing.assert_array_equal(few(x, table, screen), whole(x, table))


@needs_vnni
@pytest.mark.parametrize("rows", [0, 1, 8, 13])
def test_rows_that_are_not_wanted_cost_nothing_and_change_nothing(rows):
    x, table = numbers(21, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    x[rows:] = np.nan
    got, complete, tried = screened(x, table, make_screen(table), jnp.int32(rows))
    assert np.all(complete) and not np.any(tried[rows:])
    np.testing.assert_array_equal(got[:rows], whole(x, table)[:rows])


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 1 << 16), norms=st.floats(0, 8))
def test_a_screen_bounds_what_it_leaves_out(seed, norms):
    rng = np.random.default_rng(seed)
    table = (numbers(77, 48, seed=seed) * 10.0 ** rng.uniform(-norms, norms, (77, 1))).astype(np.float32)
    screen = make_screen(table)
    scale, lost, length = (np.asarray(screen.words)[:, which].reshape(-1)[:77] for which in (SCALE, LOST, LENGTH))
    codes = np.asarray(screen.codes).transpose(0, 2, 1, 3).reshape(-1, 48)[:77].astype(np.float64) - OFFSET
    held = codes * scale[:, None].astype(np.float64)
    assert (np.linalg.norm(table - held, axis=1) <= lost).all()
    assert (np.linalg.norm(held, axis=1) <= length).all()
    assert np.abs(codes).max() == 127


@pytest.mark.parametrize("shape", SHAPES)
def test_a_screen_has_the_shapes_that_are_foretold(shape):
    told = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract_screen(*shape))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), make_screen(numbers(*shape))) == told


def test_other_platforms_need_no_screen():
    x, table = numbers(5, INPUTS), numbers(OUTPUTS, INPUTS, seed=1)
    got = screened_argmax(x, table, abstract_screen(OUTPUTS, INPUTS), impl="xla")
    np.testing.assert_array_equal(got, (x @ table.T).argmax(1))
    np.testing.assert_array_equal(got, reference.screened_argmax(x, table))


def test_tables_that_are_no_float32_in_whole_vectors_are_not_screened():
    assert not screens((OUTPUTS, INPUTS), jnp.bfloat16, "cpu")
    assert not screens((OUTPUTS, 60), jnp.float32, "cpu")
    assert not screens((OUTPUTS, INPUTS), jnp.float32, "xla")
