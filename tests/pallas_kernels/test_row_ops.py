"""Row operations: a CPU's loops against jnp, rows that do not meet, and what is left to XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from pallas_kernels.row_ops import add_rms_norm, cpu, gated, largest, rms_norm

ROWS, SIZE, EPS = 37, 88, 1e-5
FUNCTIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


def numbers(*shape, seed=0, spread=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * spread, jnp.float32)


def norm_in_float64(x, scale, offset):
    wide = np.asarray(x, np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * (offset + np.asarray(scale, np.float64))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, SIZE), (ROWS, SIZE), (ROWS, 3, 64), (5, 7)])
def test_a_norm_is_that_of_float64(shape, offset):
    x, scale = numbers(*shape), numbers(shape[-1], seed=1)
    got = jax.jit(lambda x: rms_norm(x, scale, EPS, offset=offset, impl="cpu"))(x)
    np.testing.assert_allclose(got, norm_in_float64(x, scale, offset), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("impl", ["cpu", "xla"])
def test_a_sum_and_its_norm_are_those_of_one_after_the_other(impl):
    x, more, scale = numbers(ROWS, SIZE), numbers(ROWS, SIZE, seed=1), numbers(SIZE, seed=2)
    total, normed = jax.jit(lambda x, more: add_rms_norm(x, more, scale, EPS, impl=impl))(x, more)
    np.testing.assert_array_equal(total, np.asarray(x) + np.asarray(more))
    np.testing.assert_array_equal(normed, jax.jit(lambda t: rms_norm(t, scale, EPS, impl=impl))(total))


def test_a_sum_leaves_what_is_added_to_as_it_is_where_it_is_used_again():
    x, more, scale = numbers(ROWS, SIZE), numbers(ROWS, SIZE, seed=1), numbers(SIZE, seed=2)

    @jax.jit
    def both(x):
        x = x * 2
        return x, add_rms_norm(x, more, scale, EPS, impl="cpu")[0]

    before, total = both(x)
    np.testing.assert_array_equal(before, np.asarray(x) * 2)
    np.testing.assert_array_equal(total, np.asarray(x) * 2 + np.asarray(more))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_a_gate_is_the_activation_times_what_it_lets_through(activation, spread):
    both = numbers(ROWS, 2 * SIZE, spread=spread)
    got = jax.jit(lambda x: gated(x, activation, impl="cpu"))(both)
    left, right = jnp.split(both, 2, axis=1)
    np.testing.assert_allclose(got, FUNCTIONS[activation](left) * right, rtol=3e-6, atol=2e-6 * spread)


@settings(max_examples=examples(10), deadline=None)
@given(rows=st.integers(1, ROWS), first=st.integers(0, ROWS - 1))
def test_a_rows_bits_depend_on_no_other_row(rows, first):
    x, more, scale = numbers(ROWS, SIZE), numbers(ROWS, SIZE, seed=1), numbers(SIZE, seed=2)
    some = slice(first, min(first + rows, ROWS))
    for all_rows, alone in zip(
        (*add_rms_norm(x, more, scale, EPS, impl="cpu"), gated(x, "silu", impl="cpu")),
        (*add_rms_norm(x[some], more[some], scale, EPS, impl="cpu"), gated(x[some], "silu", impl="cpu")),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(all_rows)[some], alone)


def test_what_is_no_number_stays_none():
    x = numbers(3, SIZE).at[1, 5].set(jnp.nan)
    normed = rms_norm(x, jnp.ones(SIZE), EPS, impl="cpu")
    let_through = gated(x, "silu", impl="cpu")
    assert np.isnan(normed[1]).all() and np.isfinite(np.delete(normed, 1, axis=0)).all()
    assert np.isnan(let_through[1, 5]) and np.isfinite(np.asarray(let_through)[[0, 2]]).all()


def test_half_precision_and_other_activations_are_left_to_xla():
    x = numbers(4, SIZE)
    assert not cpu.takes(x.astype(jnp.bfloat16))
    assert gated(x, "relu", impl="cpu") is None
    assert gated(x, "silu", impl="xla") is None
    assert rms_norm(x.astype(jnp.bfloat16), jnp.ones(SIZE), EPS, impl="cpu").dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [3, 512, 1300])
def test_the_first_of_the_largest_is_found_and_exponentials_are_added_up(size):
    x = numbers(ROWS, size, spread=5.0).at[2, 0].set(50.0).at[2, size - 1].set(50.0).at[3, size - 1].set(60.0)
    x = x.at[4, :2].set(-jnp.inf)
    places, totals = jax.jit(lambda x: largest(x, impl="cpu"))(x)
    np.testing.assert_array_equal(places, np.asarray(x).argmax(axis=1))
    np.testing.assert_allclose(totals, jax.nn.logsumexp(x, axis=1), rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(places, largest(x)[0])
