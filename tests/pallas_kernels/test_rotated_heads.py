"""Joined queries, keys and values are taken apart and rotated, on a CPU and as a TPU does; tests/aot tries the Triton
kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples
from tpu_interpreter import run_recording_races

from jpaged_models.rope import rotate
from pallas_kernels.rotated_heads import HeadNorms, rotated_heads, takes, tpu
from pallas_kernels.row_ops import rms_norm
from pallas_kernels.stacked_row import StackedRow


def inputs(tokens=3, kv_heads=2, group=4, head_dim=16, half=8, dtype="float32"):
    random = np.random.default_rng(0)
    joined = jnp.asarray(random.normal(size=(tokens, kv_heads, group + 2, head_dim)), dtype)
    angles = random.uniform(0, 60, (tokens, half)).astype(np.float32)
    return joined, jnp.cos(angles), jnp.sin(angles)


@given(group=st.integers(1, 5), half=st.integers(1, 8), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=examples(15), deadline=None)
def test_parts_are_those_that_a_model_cuts_out_and_rotates(group, half, dtype):
    joined, cos, sin = inputs(group=group, half=half, dtype=dtype)
    q, k, v = rotated_heads(joined, cos, sin, impl="reference")
    assert np.array_equal(q, rotate(joined[:, :, :group], (cos, sin)))
    assert np.array_equal(k, rotate(joined[:, :, group], (cos, sin)))
    assert np.array_equal(v, joined[:, :, group + 1])


def norms_of(head_dim, offset=0.0):
    q, k = np.random.default_rng(1).uniform(0.5, 1.5, (2, head_dim)).astype(np.float32)
    return HeadNorms(jnp.asarray(q), jnp.asarray(k), eps=1e-3, offset=offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_queries_and_keys_are_normed_by_scales_of_their_own_before_they_are_rotated(dtype, offset):
    joined, cos, sin = inputs(group=3, half=6, dtype=dtype)
    norms = norms_of(16, offset)
    q, k, v = rotated_heads(joined, cos, sin, norms, impl="reference")
    normed = [rms_norm(joined[:, :, :4], scale, 1e-3, offset=offset) for scale in (norms.q, norms.k)]
    assert np.array_equal(q, rotate(normed[0][:, :, :3], (cos, sin)))
    assert np.array_equal(k, rotate(normed[1][:, :, 3], (cos, sin)))
    assert np.array_equal(v, joined[:, :, 4])


def test_too_few_rows_and_too_many_pairs_are_refused():
    joined, cos, sin = inputs()
    with pytest.raises(ValueError, match="joined has 2 rows"):
        rotated_heads(joined[:, :, :2], cos, sin, impl="reference")
    with pytest.raises(ValueError, match="8 pairs are more than a head of 10 has"):
        rotated_heads(joined[..., :10], cos, sin, impl="reference")


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("width", "half"), [(64, 32), (48, 24), (64, 16)])
def test_a_loop_of_a_cpu_turns_queries_and_keys_and_leaves_values(width, half, normed):
    joined, cos, sin = inputs(tokens=37, kv_heads=3, head_dim=width, half=half)
    norms = norms_of(width, 1.0) if normed else None
    q, k, v = jax.jit(lambda joined: rotated_heads(joined, cos, sin, norms, impl="cpu"))(joined)
    expected = rotated_heads(joined, cos, sin, norms, impl="reference")
    np.testing.assert_allclose(q, expected[0], atol=3e-6)
    np.testing.assert_allclose(k, expected[1], atol=3e-6)
    np.testing.assert_array_equal(v, expected[2])


def test_half_precision_on_a_cpu_and_other_versions_are_not_taken():
    assert takes("float32", "cpu") and not takes("bfloat16", "cpu")
    assert not takes("float32", "tpu")
    with pytest.raises(ValueError, match="impl='xla' is not"):
        rotated_heads(*inputs(), impl="xla")


def assert_rotated(got, given):
    """Queries and keys may differ by their last rounding, and by that of their norm."""
    q, k, v = rotated_heads(*given, impl="reference")
    room = 1 if len(given) == 3 else 4
    step = 2**-7 if q.dtype == jnp.bfloat16 else 2**-22
    for ours, want in zip(got[:2], (q, k), strict=True):
        assert ours.shape == want.shape and ours.dtype == want.dtype
        np.testing.assert_allclose(ours.astype(jnp.float32), want.astype(jnp.float32), rtol=step, atol=room * step)
    np.testing.assert_array_equal(got[2].astype(jnp.float32), v.astype(jnp.float32))


@pytest.mark.parametrize(
    ("dtype", "normed"),
    [
        ("bfloat16", True),
        ("float32", False),
        pytest.param("bfloat16", False, marks=pytest.mark.nightly),
        pytest.param("float32", True, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "head_dim"), [(8, 1, 4, 128), (64, 2, 1, 128), (144, 1, 3, 256), (24, 3, 5, 128)]
)
def test_a_tpu_turns_queries_and_keys_and_leaves_values(tokens, kv_heads, group, head_dim, dtype, normed):
    given = inputs(tokens, kv_heads, group, head_dim, head_dim // 2, dtype)
    given += (norms_of(head_dim, 1.0),) if normed else ()
    assert takes(dtype, "tpu_interpret", shape=given[0].shape, half=head_dim // 2)
    assert_rotated(jax.jit(lambda: rotated_heads(*given, impl="tpu_interpret"))(), given)


@pytest.mark.parametrize("impl", ["tpu_interpret", "reference", "cpu"])
def test_scales_of_heads_are_read_from_the_stack_of_all_layers(impl):
    given, norms = inputs(16, 2, 3, 128, 64, "float32"), norms_of(128, 1.0)
    layers = jnp.stack([-norms.q, norms.k, norms.q])[:, None]
    turn = jax.jit(lambda q, k: rotated_heads(*given, norms._replace(q=q, k=k), impl=impl))
    of_stack = turn(StackedRow(layers, jnp.int32(2)), StackedRow(layers, jnp.int32(1)))
    for ours, theirs in zip(of_stack, turn(norms.q, norms.k), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.nightly
def test_a_tpu_turns_tiles_of_tokens_without_a_race():
    given, norms = inputs(192, 2, 4, 128, 64, "bfloat16"), norms_of(128)
    got, races = run_recording_races(tpu.rotated_heads, *given, norms=norms)
    assert not races
    assert_rotated(got, (*given, norms))


@pytest.mark.parametrize(
    ("shape", "half"),
    [((9, 1, 3, 128), 64), ((8, 1, 3, 64), 32), ((8, 1, 3, 128), 32)],
    ids=["too few tokens", "narrow heads", "part of a head"],
)
def test_a_tpus_kernel_takes_whole_registers_that_turn(shape, half):
    assert not takes("bfloat16", "tpu", shape=shape, half=half)
    given = inputs(*shape[:2], shape[2] - 2, shape[3], half)
    with pytest.raises(ValueError, match=rf"with {half} pairs each are no whole registers"):
        rotated_heads(*given, impl="tpu")
