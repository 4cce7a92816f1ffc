import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantised_cases import FORMS, RNG, by_hand, random_matrix

from jpaged.loading.weight_formats.on_load import quantise
from pallas_kernels.quantised import UINT4_PAIRS, QuantisedMatrix


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("shape", "axis"), [((64, 6), -2), ((6, 64), -1), ((3, 64, 5), -2)])
def test_values_are_codes_times_scales_plus_minimums(form, shape, axis):
    matrix = random_matrix(form, shape, axis)
    assert matrix.shape == shape
    np.testing.assert_allclose(matrix.dequantised(jnp.float32), by_hand(matrix), rtol=1e-6, atol=1e-6)


def test_rows_of_a_table_are_read_and_ids_out_of_range_read_some_row():
    table = random_matrix(FORMS["int8 groups"], (10, 32), axis=-1)
    rows = table.rows(jnp.array([3, 99, 3])).dequantised(jnp.float32)
    np.testing.assert_array_equal(rows, by_hand(table)[[3, 9, 3]])


def test_a_transposed_table_is_a_matrix():
    table = random_matrix(FORMS["int8 groups"], (10, 32), axis=-1)
    np.testing.assert_array_equal(table.T.dequantised(jnp.float32), by_hand(table).T)


def test_only_products_and_rows_understand_it():
    matrix = random_matrix(FORMS["int8"], (32, 4))
    assert matrix[...] is matrix
    with pytest.raises(TypeError, match="only products"):
        matrix[0]


@pytest.mark.parametrize("name", ["int8", "int8 groups", "fp8", "int4", "uint4"])
@pytest.mark.parametrize(("shape", "axis"), [((64, 6), -2), ((6, 64), -1), ((3, 64, 5), -2)])
def test_quantised_values_are_within_half_a_step(name, shape, axis, monkeypatch):
    monkeypatch.setattr("jpaged.loading.weight_formats.on_load._CHUNK_BYTES", 64 * 4 * 2)  # several chunks
    form = FORMS[name]
    values = RNG.standard_normal(shape, np.float32)
    matrix = quantise(values, axis, form)
    error = np.abs(np.asarray(matrix.dequantised(jnp.float32)) - values)
    scales = np.asarray(matrix.scales, np.float32)
    step = np.repeat(scales, values.shape[axis] // scales.shape[axis], axis=axis)
    # float8 has 3 bits after the leading one; a float16 scale and minimum add their own rounding.
    limit = np.abs(values) / 16 + step * 2**-9 if name == "fp8" else 0.51 * step + (2**-10 if name == "int4" else 0)
    assert (error <= limit).all()


def test_largest_values_are_kept_exactly_by_channel_int8():
    values = RNG.standard_normal((64, 6), np.float32)
    matrix = quantise(values, -2, FORMS["int8"])
    assert (np.abs(matrix.codes).max(axis=0) == 127).all()
    assert matrix.scales.shape == (1, 6)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_zeros_stay_zero(name):
    values = np.zeros((64, 3), np.float32)
    values[:32, 1] = 1.0  # padding beside real values
    restored = np.asarray(quantise(values, -2, FORMS[name]).dequantised(jnp.float32))
    np.testing.assert_allclose(restored, values, atol=1e-3)
    assert (restored[values == 0] == 0).all()


def test_a_matrix_is_a_tree_of_its_parts():
    matrix = random_matrix(FORMS["int4"], (64, 4))
    leaves, tree = jax.tree.flatten(matrix)
    assert [leaf.shape for leaf in leaves] == [(32, 4), (2, 4), (2, 4)]
    again = jax.tree.unflatten(tree, leaves)
    assert isinstance(again, QuantisedMatrix)
    assert (again.axis, again.codec) == (-2, UINT4_PAIRS)
