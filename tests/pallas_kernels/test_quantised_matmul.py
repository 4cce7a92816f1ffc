"""Products with quantised matrices: against float64 products of their values, by themselves and inside shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from quantised_cases import FORMS, RNG, by_hand, random_matrix

from pallas_kernels.quantised_matmul import quantised_matmul, quantised_matmul_grouped, quantised_matmul_table, tpu
from pallas_kernels.quantised_matmul.reference import multiply_as_float8


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_products_are_those_of_the_values(form, dtype):
    matrix = random_matrix(form, (64, 24))
    x = jnp.asarray(RNG.standard_normal((5, 64), np.float32), dtype)
    found = jax.jit(lambda x, matrix: quantised_matmul(x, [matrix]))(x, matrix)
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
    found = jax.jit(quantised_matmul_table)(jnp.asarray(hidden), table)
    want = hidden.astype(np.float64) @ np.asarray(table.dequantised(jnp.float32), np.float64).T
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


def test_one_of_several_matrices_is_chosen_by_a_traced_number():
    matrices = [random_matrix(FORMS["int8 groups"], (32, 8)) for _ in range(3)]
    x = jnp.asarray(RNG.standard_normal((4, 32), np.float32))
    chosen = jax.jit(lambda x, index: quantised_matmul(x, matrices, index))
    for number, matrix in enumerate(matrices):
        np.testing.assert_allclose(chosen(x, number), quantised_matmul(x, [matrix]), rtol=1e-5, atol=1e-4)


def test_the_result_has_the_dtype_that_was_asked_for():
    matrix, x = random_matrix(FORMS["int4"], (32, 8)), jnp.ones((2, 32), jnp.bfloat16)
    assert quantised_matmul(x, [matrix], out_dtype=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_products_work_inside_shard_map(form):
    matrix, table = random_matrix(form, (64, 24)), random_matrix(form, (2048, 64), axis=-1)
    x = jnp.asarray(RNG.standard_normal((5, 64), np.float32))
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))

    def local(x, matrix, table):
        return quantised_matmul(x, [matrix]), quantised_matmul_table(x, table)

    columns, rows = P(None, "tensor"), P("tensor", None)
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), columns, rows), out_specs=(columns, columns), check_vma=False
    )
    for found, want in zip(jax.jit(sharded)(x, matrix, table), jax.jit(local)(x, matrix, table), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("form", [FORMS["int4"], FORMS["mxfp4"]], ids=["int4", "mxfp4"])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize(
    "counts", [[3, 0, 1], [0, 0, 0], [9, 0, 11], [0, 33, 1]], ids=["few", "none here", "tiles", "many"]
)
def test_rows_meet_their_experts_and_others_give_nothing(form, impl, counts):
    table = random_matrix(form, (3, 32, 8))
    rows = sum(counts) + 2  # the last two are of experts that are elsewhere
    x = RNG.standard_normal((rows, 32), np.float32)
    found = jax.jit(partial(quantised_matmul_grouped, impl=impl))(jnp.asarray(x), table, jnp.asarray(counts))
    values = by_hand(table).astype(np.float64)
    expert = np.repeat(range(3), counts)
    want = np.einsum("ri,rio->ro", x[:-2].astype(np.float64), values[expert])
    np.testing.assert_allclose(found[:-2], want, atol=1e-5 * np.abs(values).max() * 32)
    np.testing.assert_array_equal(found[-2:], 0)


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="impl='cuda' is not one of"):
        quantised_matmul(jnp.ones((1, 32)), [random_matrix(FORMS["int8"], (32, 8))], impl="cuda")


@pytest.mark.parametrize("rows", [5, tpu.FEW_ROWS + 2, tpu.MANY_ROWS])
@pytest.mark.parametrize("input_shards", [1, 2])
@pytest.mark.parametrize("form", [FORMS["uint4"], FORMS["int8"]], ids=["uint4", "int8"])
def test_a_tpu_multiplies_codes_as_they_are(form, input_shards, rows):
    matrix = random_matrix(form, (64, 24))
    x = jnp.asarray(RNG.standard_normal((rows, 64), np.float32), jnp.bfloat16)
    x = x.at[1].set(0)
    multiply = partial(quantised_matmul, input_shards=input_shards, impl="tpu")
    found = jax.jit(lambda x, matrix: multiply(x, [matrix]))(x, matrix)
    want = np.asarray(x, np.float64) @ by_hand(matrix)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), want, atol=2e-2 * np.abs(want).max())
    assert not np.asarray(found[1]).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_rounded_to_float8_multiply_within_their_rounding(dtype):
    """A number has four significant bits, so that an error is at most a 16th of it; a row of zeros stays zero."""
    matrix = random_matrix(FORMS["fp8"], (64, 24))
    x = RNG.standard_normal((5, 64), np.float32) * np.array([[1e-3], [1], [0], [30], [1]], np.float32)
    rows = jnp.asarray(x, dtype)
    found = np.asarray(multiply_as_float8(rows, matrix, dtype), np.float64)
    values = by_hand(matrix)
    want = np.asarray(rows, np.float64) @ values
    assert (np.abs(found - want) <= np.abs(np.asarray(rows, np.float64)) @ np.abs(values) / 16 + 1e-3).all()
    assert (found[2] == 0).all()
