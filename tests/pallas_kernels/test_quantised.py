import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.loading.quantise import quantise
from jpaged.loading.quantised_format import FP8, INT8, PACKED, Format
from pallas_kernels.quantised import QuantisedMatrix, quantised_dot, quantised_table_dot

RNG = np.random.default_rng(0)
FLOAT32, HALF = np.dtype(np.float32), np.dtype(np.float16)
FORMS = {
    "int8": Format(INT8, 0, FLOAT32),
    "int8 groups": Format(INT8, 16, HALF),
    "int8 minimums": Format(INT8, 16, HALF, minimums=True),
    "fp8": Format(FP8, 0, FLOAT32),
    "int4": Format(PACKED, 32, HALF, minimums=True),
}


def random_matrix(form, shape, axis=-2):
    """Random codes, so that no rounding is shared with the code that quantises."""

    def make(shape, dtype):
        if dtype in (INT8, PACKED):
            return RNG.integers(0, 100, shape).astype(dtype)
        return RNG.standard_normal(shape, np.float32).astype(dtype)

    return form.parts(axis, shape, make)


def by_hand(matrix):
    """Value by value."""
    codes, scales = np.asarray(matrix.codes), np.asarray(matrix.scales, np.float32)
    axis = codes.ndim + matrix.axis
    size = matrix.shape[axis] // scales.shape[axis]
    out = np.empty(matrix.shape, np.float32)
    for at in np.ndindex(*matrix.shape):
        group = (*at[:axis], at[axis] // size, *at[axis + 1 :])
        if matrix.packed:
            place = at[axis] % size
            byte = codes[(*at[:axis], at[axis] // size * (size // 2) + place % (size // 2), *at[axis + 1 :])]
            code = byte & 15 if place < size // 2 else byte >> 4
        else:
            code = codes[at]
        out[at] = np.float32(code) * scales[group]
        if matrix.minimums is not None:
            out[at] += np.float32(matrix.minimums[group])
    return out


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("shape", "axis"), [((64, 6), -2), ((6, 64), -1), ((3, 64, 5), -2)])
def test_values_are_codes_times_scales_plus_minimums(form, shape, axis):
    matrix = random_matrix(form, shape, axis)
    assert matrix.shape == shape
    np.testing.assert_allclose(matrix.dequantised(jnp.float32), by_hand(matrix), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_those_of_the_values(form, dtype):
    matrix = random_matrix(form, (64, 24))
    x = jnp.asarray(RNG.standard_normal((5, 64), np.float32), dtype)
    found = jax.jit(quantised_dot)(x, matrix)
    want = np.asarray(x, np.float64) @ by_hand(matrix)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(found, np.float64), want, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocab", [96, 2048, 2050], ids=["small", "two chunks", "no whole chunks"])
@pytest.mark.parametrize("form", [FORMS["int8"], FORMS["int8 groups"]], ids=["channel", "groups"])
def test_logits_are_products_with_the_tables_rows(form, vocab, rows):
    table = random_matrix(form, (vocab, 32), axis=-1)
    hidden = RNG.standard_normal((rows, 32), np.float32)
    found = jax.jit(quantised_table_dot)(jnp.asarray(hidden), table)
    want = hidden.astype(np.float64) @ np.asarray(table.dequantised(jnp.float32), np.float64).T
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


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


@pytest.mark.parametrize("name", ["int8", "int8 groups", "fp8", "int4"])
@pytest.mark.parametrize(("shape", "axis"), [((64, 6), -2), ((6, 64), -1), ((3, 64, 5), -2)])
def test_quantised_values_are_within_half_a_step(name, shape, axis, monkeypatch):
    monkeypatch.setattr("jpaged.loading.quantise._CHUNK_BYTES", 64 * 4 * 2)  # several chunks
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
    assert (again.axis, again.packed) == (-2, True)
