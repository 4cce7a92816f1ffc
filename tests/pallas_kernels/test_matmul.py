"""Products on CPU: against float64, and a row's bits whatever is beside it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from pallas_kernels.cpu_tiles import LANES
from pallas_kernels.matmul import matmul, matmul_table
from pallas_kernels.matmul.cpu_kernel import DEPTH, FAR, PANEL, PORTION

multiply = jax.jit(matmul, static_argnames=("impl", "out_dtype"))
multiply_by_table = jax.jit(matmul_table, static_argnames="impl")


@cache
def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def exact(a, b):
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.integers(1, 70),
    inputs=st.one_of(st.integers(1, 100), st.sampled_from([DEPTH - 1, DEPTH, DEPTH + 1, 2 * DEPTH + 5])),
    vectors=st.integers(1, 11),
)
def test_products_agree_with_float64(rows, inputs, vectors):
    x, matrix = numbers(rows, inputs), numbers(inputs, vectors * LANES)
    out = multiply(x, [matrix], impl="cpu")
    np.testing.assert_allclose(out, exact(x, matrix), rtol=0, atol=2e-6 * inputs)


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.integers(1, 70),
    vectors=st.integers(1, 9),
    outputs=st.one_of(st.integers(1, 20), st.integers(PORTION - 1, 3 * PORTION)),
)
def test_products_with_a_table_agree_with_float64(rows, vectors, outputs):
    x, table = numbers(rows, vectors * LANES), numbers(outputs, vectors * LANES)
    out = multiply_by_table(x, table, impl="cpu")
    np.testing.assert_allclose(out, exact(x, table.T), rtol=0, atol=2e-5 * vectors)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 17, 31, 64])
def test_a_row_has_the_same_bits_in_every_batch(rows):
    x, matrix = numbers(64, DEPTH + 100), numbers(DEPTH + 100, 2 * PANEL + LANES)
    every = np.asarray(multiply(x, [matrix], impl="cpu"))
    assert np.array_equal(multiply(x[:rows], [matrix], impl="cpu"), every[:rows])
    assert np.array_equal(multiply(x[-rows:], [matrix], impl="cpu"), every[-rows:])


@pytest.mark.parametrize("panels", [0, 1, 5])
@pytest.mark.parametrize("vectors", [0, 1, 2])
def test_one_row_has_the_bits_it_has_beside_another_however_wide_the_matrix_is(panels, vectors):
    columns = FAR // 4 + panels * PANEL + vectors * LANES + LANES
    x, matrix = numbers(2, DEPTH + 100), numbers(DEPTH + 100, columns)
    both = np.asarray(multiply(x, [matrix], impl="cpu"))
    assert np.array_equal(multiply(x[:1], [matrix], impl="cpu"), both[:1])
    alone = np.asarray(multiply(x, [matrix], rows=jnp.int32(1), impl="cpu"))
    assert np.array_equal(alone[:1], both[:1])
    assert not alone[1:].any()


@pytest.mark.parametrize("rows", [0, 1, 7, 24, 63, 64, 99])
def test_rows_that_are_not_wanted_are_0(rows):
    x, matrix = numbers(64, 100), numbers(100, PANEL + LANES)
    out = np.asarray(multiply(x, [matrix], rows=jnp.int32(rows), impl="cpu"))
    assert np.array_equal(out[:rows], multiply(x, [matrix], impl="cpu")[:rows])
    assert not out[rows:].any()


@pytest.mark.parametrize("rows", [0, 1, 7, 63, 64, 99])
def test_rows_that_are_not_wanted_are_0_multiplied_with_a_table(rows):
    x, table = numbers(64, 5 * LANES), numbers(PORTION + 3, 5 * LANES)
    out = np.asarray(multiply_by_table(x, table, rows=jnp.int32(rows), impl="cpu"))
    assert np.array_equal(out[:rows], multiply_by_table(x, table, impl="cpu")[:rows])
    assert not out[rows:].any()


@pytest.mark.parametrize("rows", [2, 3, 16, 33])
def test_a_row_has_the_same_bits_in_every_batch_multiplied_with_a_table(rows):
    x, table = numbers(64, 5 * LANES), numbers(PORTION + 3, 5 * LANES)
    every = np.asarray(multiply_by_table(x, table, impl="cpu"))
    assert np.array_equal(multiply_by_table(x[:rows], table, impl="cpu"), every[:rows])


def test_one_matrix_of_several_is_read_in_a_loop():
    x, matrices = numbers(5, 40), [np.full((40, PANEL), np.nan, np.float32), numbers(40, PANEL), numbers(40, PANEL) + 1]

    @jax.jit
    def each(x, *matrices):
        return jax.lax.map(lambda index: matmul(x, matrices, index, impl="cpu"), jnp.arange(3))

    out = each(x, *matrices)
    assert np.isnan(out[0]).all()
    for index in (1, 2):
        np.testing.assert_allclose(out[index], exact(x, matrices[index]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [LANES - 1, LANES])
@pytest.mark.parametrize("number", [1, 2])
def test_what_the_loops_do_not_take_is_xlas(dtype, columns, number):
    x, matrices = numbers(3, 20).astype(dtype), [numbers(20, columns).astype(dtype)] * number
    ours = dtype == "float32" and columns == LANES
    assert ("jpaged_matmul" in multiply.lower(x, matrices, number - 1, impl="cpu").as_text()) == ours
    np.testing.assert_allclose(
        multiply(x, matrices, number - 1, impl="cpu", out_dtype=jnp.dtype("float32")),
        exact(x, matrices[0]),
        rtol=0,
        atol=1e-4,
    )


def test_xla_multiplies_unless_told_otherwise():
    x, matrix = numbers(4, 32), numbers(32, PANEL)
    assert "jpaged_matmul" not in multiply.lower(x, [matrix]).as_text()
    np.testing.assert_allclose(multiply(x, [matrix, matrix], 1), exact(x, matrix), rtol=0, atol=1e-4)
    for rows in (1, 4):
        np.testing.assert_allclose(multiply_by_table(x[:rows], matrix.T), exact(x[:rows], matrix), rtol=0, atol=1e-4)
