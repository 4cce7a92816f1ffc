"""Products of rows with their experts' matrices: against float64, only the matrices that have rows, bits of a row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from pallas_kernels.cpu_tiles import LANES
from pallas_kernels.matmul import matmul_grouped
from pallas_kernels.matmul.cpu_kernel import PANEL

EXPERTS, ROWS = 5, 24
multiply = {impl: jax.jit(partial(matmul_grouped, impl=impl)) for impl in ("xla", "cpu")}


def arrays(inputs, outputs, dtype=np.float32):
    rng = np.random.default_rng(inputs + outputs)
    return rng.standard_normal((ROWS, inputs)).astype(dtype), rng.standard_normal((EXPERTS, inputs, outputs)).astype(
        dtype
    )


def exact(x, table, counts):
    expert = np.repeat(range(EXPERTS), counts)
    want = np.zeros((len(x), table.shape[2]))
    want[: len(expert)] = np.einsum("ri,rio->ro", x[: len(expert)].astype(float), table[expert].astype(float))
    return want


@pytest.mark.parametrize("impl", ["xla", "cpu"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype"),
    [(800, PANEL + 2 * LANES, "float32"), (33, LANES, "float32"), (40, 24, "bfloat16"), (40, 7, "float32")],
    ids=["panels", "one vector", "bfloat16", "no whole vector"],
)
def test_rows_meet_their_experts_and_others_give_nothing(impl, inputs, outputs, dtype):
    x, table = arrays(inputs, outputs, jnp.dtype(dtype))
    tolerance = 2e-6 * inputs if dtype == "float32" else 0.2

    @settings(max_examples=examples(15), deadline=None)
    @given(st.lists(st.integers(0, EXPERTS - 1), max_size=ROWS))
    def check(experts):
        counts = np.bincount(np.asarray(experts, int), minlength=EXPERTS)
        found = multiply[impl](x, table, np.asarray(counts))
        assert found.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), exact(x, table, counts), atol=tolerance)

    check()


def test_a_matrix_without_rows_is_not_multiplied():
    x, table = arrays(64, 2 * PANEL)
    table[[0, 2, 4]] = np.nan
    found = np.asarray(multiply["cpu"](x, table, np.asarray([0, 7, 0, 9, 0])))
    assert np.isfinite(found).all()


def test_a_row_has_the_same_bits_whatever_is_beside_it():
    x, table = arrays(900, PANEL + LANES)
    every = np.asarray(multiply["cpu"](x, table, np.asarray([0, 24, 0, 0, 0])))
    for counts in ([3, 5, 0, 16, 0], [3, 1, 20, 0, 0], [3, 13, 4, 4, 0]):
        some = np.asarray(multiply["cpu"](x, table, np.asarray(counts)))
        np.testing.assert_array_equal(some[3 : 3 + counts[1]], every[3 : 3 + counts[1]])


def test_rows_beyond_the_offsets_of_a_gpus_kernel_are_left_to_xla():
    """Nothing imports Triton, which is not installed here."""
    of = jax.ShapeDtypeStruct
    given = of((2**17, 2**13), jnp.bfloat16), of((8, 2**13, 2**14), jnp.bfloat16), of((8,), jnp.int32)
    assert jax.eval_shape(partial(matmul_grouped, impl="gpu"), *given).shape == (2**17, 2**14)
