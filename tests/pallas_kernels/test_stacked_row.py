"""A layer's vector, named by the array of all layers' and the layer's number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.stacked_row import StackedRow, stacked, vector_of

STACK = jnp.arange(12.0).reshape(3, 1, 4)


def test_a_row_is_read_by_its_number_and_a_vector_is_itself():
    read = jax.jit(lambda number: vector_of(StackedRow(STACK, number)))
    np.testing.assert_array_equal([read(jnp.int32(number)) for number in range(3)], STACK[:, 0])
    assert vector_of(STACK[1, 0]).shape == (4,)


def test_a_vector_of_no_stack_is_the_first_of_one():
    alone = stacked(STACK[2, 0])
    assert alone.stack.shape == (1, 1, 4)
    np.testing.assert_array_equal(alone.read(), STACK[2, 0])
    row = StackedRow(STACK, jnp.int32(1))
    assert stacked(row) is row


def test_a_row_passes_through_a_trace_and_cannot_be_cut_in_two():
    row = StackedRow(STACK, jnp.int32(2))
    np.testing.assert_array_equal(jax.jit(lambda row: row.read())(row), STACK[2, 0])
    assert row[...] is row
    with pytest.raises(TypeError, match="cannot be indexed with 1: read it by vector_of"):
        row[1]
