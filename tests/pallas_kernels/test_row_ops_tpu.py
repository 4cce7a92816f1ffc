"""A TPU's launches of a norm, and of an addition and its norm, run by Pallas' interpreter, against XLA's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import run_recording_races

from pallas_kernels.row_ops import add_rms_norm, rms_norm, tpu
from pallas_kernels.stacked_row import StackedRow

EPS = 1e-5


def operands(rows, size, dtype, seed=0):
    random = np.random.default_rng(seed)
    x, more = (jnp.asarray(random.normal(size=(rows, size)), dtype) for _ in range(2))
    return x, more, jnp.asarray(random.normal(size=size), dtype)


LARGE = pytest.param(144, 4096, marks=pytest.mark.nightly)
"""A model's rows, for which the interpreter takes ten seconds."""


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "size"), [(8, 128), (16, 384), (24, 256), (64, 128), LARGE])
def test_a_sum_and_its_norm_are_xlas(rows, size, dtype, offset):
    given = operands(rows, size, dtype)
    total, normed = jax.jit(partial(add_rms_norm, eps=EPS, offset=offset, impl="tpu_interpret"))(*given)
    want_total, want = jax.jit(partial(add_rms_norm, eps=EPS, offset=offset, impl="xla"))(*given)
    assert total.dtype == normed.dtype == dtype
    np.testing.assert_array_equal(total, want_total)
    np.testing.assert_allclose(
        normed.astype(jnp.float32), want.astype(jnp.float32), rtol=2**-7 if dtype == "bfloat16" else 2e-6, atol=1e-6
    )


def test_a_rows_bits_depend_on_no_other_row():
    x, more, scale = operands(64, 256, "bfloat16")
    add = jax.jit(partial(add_rms_norm, eps=EPS, impl="tpu_interpret"))
    together, alone = add(x, more, scale), add(x[48:], more[48:], scale)
    for all_rows, some in zip(together, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(all_rows, np.float32)[48:], np.asarray(some, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_is_read_from_the_stack_of_all_layers(dtype):
    x, more, _ = operands(64, 256, dtype)
    scales = jnp.stack([operands(8, 256, dtype, seed)[2] for seed in range(5)])
    add = jax.jit(partial(add_rms_norm, eps=EPS, impl="tpu_interpret"))
    norm = jax.jit(partial(rms_norm, eps=EPS, impl="tpu_interpret"))
    for layer in (0, 3, 4):
        row = StackedRow(scales[:, None], jnp.int32(layer))
        for got, want in zip(add(x, more, row), add(x, more, scales[layer]), strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(norm(x, row), norm(x, scales[layer]))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "size"), [(8, 128), (24, 256), LARGE])
def test_a_norm_alone_is_that_of_a_sum_with_nothing(rows, size, dtype, offset):
    x, _, scale = operands(rows, size, dtype)
    got = jax.jit(partial(rms_norm, eps=EPS, offset=offset, impl="tpu_interpret"))(x, scale)
    _, want = add_rms_norm(x, jnp.zeros_like(x), scale, EPS, offset=offset, impl="tpu_interpret")
    np.testing.assert_array_equal(got, want)


@pytest.mark.nightly
def test_tiles_of_rows_are_added_and_normed_without_a_race():
    given = operands(288, 4096, "bfloat16")
    got, races = run_recording_races(lambda *a, interpret: tpu.add_rms_norm(*a, EPS, 0.0, interpret=interpret), *given)
    assert not races
    for ours, xlas in zip(got, add_rms_norm(*given, EPS), strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), xlas.astype(jnp.float32), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(("rows", "size", "dtype"), [(9, 128, "float32"), (8, 96, "float32"), (8, 128, "float16")])
def test_what_fills_no_registers_is_left_to_xla(rows, size, dtype):
    x, more, scale = operands(rows, size, dtype)
    row = StackedRow(jnp.stack([scale[None], -scale[None]]), jnp.int32(0))
    assert not tpu.takes(x, more)
    for of_stack in (scale, row):
        for ours, xlas in zip(
            add_rms_norm(x, more, of_stack, EPS, impl="tpu_interpret"), add_rms_norm(x, more, scale, EPS), strict=True
        ):
            np.testing.assert_array_equal(ours, xlas)
        np.testing.assert_array_equal(
            rms_norm(x, of_stack, EPS, impl="tpu_interpret"), rms_norm(x, scale, EPS, impl="xla")
        )
    for launch in (partial(tpu.add_rms_norm, x, more), partial(tpu.rms_norm, x)):
        with pytest.raises(ValueError, match=rf"rows of \({rows}, {size}\) {dtype}"):
            launch(scale, EPS, 0.0)
