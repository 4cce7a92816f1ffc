"""Matrices of float32 in panels: the numbers and the products of arrays, to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from pallas_kernels.matmul import cpu_kernel, matmul
from pallas_kernels.panelled_floats import PANEL, abstract, panelled_floats, takes
from pallas_kernels.products import multiply

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def held(matrix):
    return jax.tree.map(jnp.asarray, panelled_floats(matrix))


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.sampled_from([1, 30, 64, 768, 770, 1700]),
    sixteens=st.integers(1, 10),
    seed=st.integers(0, 99),
)
def test_products_have_the_bits_of_arrays(rows, inputs, sixteens, seed):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((inputs, 16 * sixteens), np.float32)
    x = jnp.asarray(rng.standard_normal((rows, inputs), np.float32))
    want = matmul(x, [jnp.asarray(matrix)], impl="cpu")
    np.testing.assert_array_equal(multiply(x, [held(matrix)], impl="cpu"), want)


def test_more_rows_than_meet_a_portion_at_once_are_multiplied_too():
    x, matrix = normal(cpu_kernel.ROWS_AT_ONCE + 9, 20), normal(20, 64)
    found = multiply(jnp.asarray(x), [held(matrix)], impl="cpu")
    for part in (slice(0, 30), slice(len(x) - 30, None)):
        np.testing.assert_array_equal(found[part], matmul(jnp.asarray(x[part]), [jnp.asarray(matrix)], impl="cpu"))


def test_one_of_several_matrices_is_chosen_and_rows_that_are_not_wanted_are_zero():
    matrices = [held(normal(64, 80)) for _ in range(3)]
    x = jnp.asarray(normal(12, 64))
    chosen = jax.jit(lambda x, index: multiply(x, matrices, index, rows=jnp.int32(5), impl="cpu"))
    for number, matrix in enumerate(matrices):
        found = chosen(x, number)
        np.testing.assert_array_equal(found[:5], multiply(x[:5], [matrix], impl="cpu"))
        assert not found[5:].any()


def test_other_platforms_multiply_the_array():
    x, matrix = normal(3, 40), normal(40, 64)
    found = multiply(jnp.asarray(x), [held(matrix)], impl="xla")
    np.testing.assert_allclose(found, x @ matrix, atol=1e-4)


@pytest.mark.parametrize("shape", [(38, 96), (5, 112), (3, 64, 16)])
def test_the_matrix_comes_back_to_the_last_bit(shape):
    matrix = normal(*shape)
    matrix.flat[:5] = 0.0, -0.0, np.inf, -np.inf, 2.0**-149
    panels = held(matrix)
    assert panels.shape == shape and panels.ndim == len(shape)
    back = np.asarray(panels.dequantised(jnp.float32))
    np.testing.assert_array_equal(back.view(np.uint32), matrix.view(np.uint32))


def test_shapes_are_those_that_are_held():
    assert jax.tree.map(lambda part: part.shape, abstract((3, 20, 112))) == jax.tree.map(
        lambda part: part.shape, panelled_floats(normal(3, 20, 112))
    )
    assert abstract((20, 112)).numbers.shape == (3, 20, PANEL)


def test_what_arrays_leave_to_xla_has_no_panels():
    assert takes((20, 112), -2) and not takes((20, 100), -2) and not takes((112, 20), -1)
    with pytest.raises(ValueError, match=r"outputs that 16 divides, not a matrix \[20, 100\]"):
        panelled_floats(normal(20, 100))


def test_rows_of_panels_are_not_read():
    with pytest.raises(TypeError, match="tables are held as arrays"):
        held(normal(16, 32)).read_rows(jnp.asarray([1]), jnp.float32)


def test_no_copy_of_the_matrix_is_made():
    matrix = held(normal(256, 528))
    run = jax.jit(lambda x, matrix: multiply(x, [matrix], impl="cpu"))
    compiled = run.lower(jnp.ones((2, 256)), matrix).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < matrix.numbers.nbytes / 8
