"""Joined queries, keys and values are taken apart and rotated, on a CPU too; tests/aot tries the Triton kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged_models.rope import rotate
from pallas_kernels.rotated_heads import rotated_heads, takes


def inputs(tokens=3, kv_heads=2, group=4, head_dim=16, half=8, dtype="float32"):
    random = np.random.default_rng(0)
    joined = jnp.asarray(random.normal(size=(tokens, kv_heads, group + 2, head_dim)), dtype)
    angles = random.uniform(0, 60, (tokens, half)).astype(np.float32)
    return joined, jnp.cos(angles), jnp.sin(angles)


@given(group=st.integers(1, 5), half=st.integers(1, 8), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
@settings(max_examples=15, deadline=None)
def test_parts_are_those_that_a_model_cuts_out_and_rotates(group, half, dtype):
    joined, cos, sin = inputs(group=group, half=half, dtype=dtype)
    q, k, v = rotated_heads(joined, cos, sin, impl="reference")
    assert np.array_equal(q, rotate(joined[:, :, :group], (cos, sin)))
    assert np.array_equal(k, rotate(joined[:, :, group], (cos, sin)))
    assert np.array_equal(v, joined[:, :, group + 1])


def test_too_few_rows_and_too_many_pairs_are_refused():
    joined, cos, sin = inputs()
    with pytest.raises(ValueError, match="joined has 2 rows"):
        rotated_heads(joined[:, :, :2], cos, sin, impl="reference")
    with pytest.raises(ValueError, match="8 pairs are more than a head of 10 has"):
        rotated_heads(joined[..., :10], cos, sin, impl="reference")


@pytest.mark.parametrize(("width", "half"), [(64, 32), (48, 24), (64, 16)])
def test_a_loop_of_a_cpu_turns_queries_and_keys_and_leaves_values(width, half):
    joined, cos, sin = inputs(tokens=37, kv_heads=3, head_dim=width, half=half)
    q, k, v = jax.jit(lambda joined: rotated_heads(joined, cos, sin, impl="cpu"))(joined)
    expected = rotated_heads(joined, cos, sin, impl="reference")
    np.testing.assert_allclose(q, expected[0], atol=1e-6)
    np.testing.assert_allclose(k, expected[1], atol=1e-6)
    np.testing.assert_array_equal(v, expected[2])


def test_half_precision_on_a_cpu_and_other_versions_are_not_taken():
    assert takes("float32", "cpu") and not takes("bfloat16", "cpu")
    assert not takes("float32", "tpu")
    with pytest.raises(ValueError, match="impl='tpu' is not"):
        rotated_heads(*inputs(), impl="tpu")
