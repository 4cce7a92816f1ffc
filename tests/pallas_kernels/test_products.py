"""Matrices of several forms in one list: each is multiplied as it would be alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.products import multiply, multiply_grouped
from pallas_kernels.quantised import INT8, UINT4_PAIRS, QuantisedMatrix
from pallas_kernels.tiled import tiled
from pallas_kernels.tiled_floats import tiled_floats

INPUTS, OUTPUTS = 64, 48


def some_forms():
    """Matrices of four forms, two of which are alike."""
    rng = np.random.default_rng(0)

    def scales(group):
        return rng.random((INPUTS // group, OUTPUTS), np.float32)

    def pairs():
        codes = rng.integers(0, 256, (INPUTS // 2, OUTPUTS)).astype(np.uint8)
        return QuantisedMatrix(codes, scales(32), -scales(32), codec=UINT4_PAIRS)

    eights = rng.integers(-127, 128, (INPUTS, OUTPUTS)).astype(np.int8)
    sixteen = QuantisedMatrix(eights, scales(16), codec=INT8)
    both = QuantisedMatrix(eights, scales(32), scales(32), codec=INT8)
    return [pairs(), sixteen, rng.standard_normal((INPUTS, OUTPUTS), np.float32), both, pairs()]


def quantised(table):
    return tiled(QuantisedMatrix(table.astype(np.int8), np.ones((len(table), 1, OUTPUTS), np.float32)))


@pytest.mark.parametrize(("impl", "tolerance"), [("cpu", 0), ("xla", 1e-5)])
def test_one_of_several_forms_is_multiplied_as_it_would_be_alone(impl, tolerance):
    forms = [tiled(one) if impl == "cpu" and isinstance(one, QuantisedMatrix) else one for one in some_forms()]
    matrices = jax.tree.map(jnp.asarray, forms)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, INPUTS)), jnp.float32)
    alone = [np.asarray(multiply(x, [matrix], impl=impl)) for matrix in matrices]
    assert len({one.tobytes() for one in alone}) == len(alone)
    chosen = jax.jit(lambda x, matrices, index: multiply(x, matrices, index, impl=impl))
    for number, want in enumerate(alone):
        found = multiply(x, matrices, number, impl=impl), chosen(x, matrices, jnp.int32(number))
        np.testing.assert_allclose(found, [want, want], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "holds", [jnp.asarray, lambda table: tiled_floats(table, -2), quantised], ids=["array", "floats", "codes"]
)
@pytest.mark.parametrize(("inputs", "experts"), [(INPUTS - 1, 3), (INPUTS, 2), (INPUTS, 4)])
def test_rows_and_counts_that_do_not_fit_the_experts_are_refused(holds, inputs, experts):
    table = holds(np.ones((3, INPUTS, OUTPUTS), np.float32))
    said = rf"x \[5, {inputs}\] and counts \[{experts}\] do not fit a table of 3 experts' matrices of {INPUTS} inputs"
    with pytest.raises(ValueError, match=said):
        multiply_grouped(jnp.ones((5, inputs)), table, jnp.ones(experts, jnp.int32), impl="cpu")
