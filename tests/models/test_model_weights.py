"""Converters place every head and column where the layout says, and zero elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jpaged_models import weights as convert

from jpaged.model_api import head_layout

EMBED, WIDTH = 5, 4


def tensors(num_heads, num_kv_heads):
    draw = np.random.default_rng(0).standard_normal
    return tuple(draw((heads * WIDTH, EMBED)) for heads in (num_heads, num_kv_heads, num_kv_heads))


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_qkv_slots_hold_the_heads_the_layout_names(num_kv_heads, share, shards):
    num_heads = num_kv_heads * share
    layout = head_layout(num_heads, num_kv_heads, shards)
    q, k, v = tensors(num_heads, num_kv_heads)
    fused = convert.fuse_qkv(layout, num_heads, num_kv_heads, WIDTH)(q, k, v)
    assert fused.shape == (EMBED, layout.kv_heads, layout.q_per_kv + 2, WIDTH)
    served = []
    for slot, (kv, heads) in enumerate(zip(layout.kv_of_slot, layout.q_of_slot, strict=True)):
        for place, head in enumerate(heads):
            want = q[head * WIDTH : (head + 1) * WIDTH].T if head >= 0 else 0
            np.testing.assert_array_equal(fused[:, slot, place], np.broadcast_to(want, (EMBED, WIDTH)))
            served += [head] * (head >= 0)
        for row, stored in ((-2, k), (-1, v)):
            want = stored[kv * WIDTH : (kv + 1) * WIDTH].T if kv >= 0 else 0
            np.testing.assert_array_equal(fused[:, slot, row], np.broadcast_to(want, (EMBED, WIDTH)))
    assert sorted(served) == list(range(num_heads))


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_the_output_projection_matches_the_query_slots(num_kv_heads, share, shards):
    """Projecting each head's queries back through `out` gives what the unfused product gives."""
    num_heads = num_kv_heads * share
    layout = head_layout(num_heads, num_kv_heads, shards)
    q, k, v = tensors(num_heads, num_kv_heads)
    out = np.random.default_rng(1).standard_normal((EMBED, num_heads * WIDTH))
    x = np.random.default_rng(2).standard_normal((3, EMBED))
    fused = convert.fuse_qkv(layout, num_heads, num_kv_heads, WIDTH)(q, k, v)
    slots = np.einsum("te,ekqd->tkqd", x, fused)[:, :, :-2]
    back = np.einsum("tkqd,kqde->te", slots, convert.split_out(layout, num_heads, WIDTH)(out))
    np.testing.assert_allclose(back, x @ q.T @ out.T, atol=1e-12)


def test_biases_follow_their_heads():
    layout = head_layout(6, 2, 4)
    q, k, v = (tensor[:, 0] for tensor in tensors(6, 2))
    whole = convert.fuse_qkv(layout, 6, 2, WIDTH)
    np.testing.assert_array_equal(whole(q, k, v), whole(*tensors(6, 2))[0])


def test_gate_and_up_stay_apart_when_padded():
    gate, up = np.ones((7, EMBED)), np.full((7, EMBED), 2.0)
    both = convert.fuse_gate_up(8)(gate, up)
    assert both.shape == (EMBED, 2, 8)
    np.testing.assert_array_equal(both[0], [[1] * 7 + [0], [2] * 7 + [0]])
    np.testing.assert_array_equal(convert.fuse_gate_up(8)(gate[:, 0], up[:, 0]), both[0])


def test_linear_is_transposed_and_padded_on_either_side():
    stored = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(convert.linear(3, 2)(stored), stored.T)
    np.testing.assert_array_equal(convert.linear(4, 3)(stored), np.pad(stored.T, ((0, 1), (0, 1))))


def test_one_shard_needs_no_padding():
    table = np.ones((211, EMBED))
    assert convert.pad_rows(211)(table) is table


def test_the_stored_dtype_is_kept():
    q, k, v = (tensor.astype(np.float16) for tensor in tensors(6, 2))
    assert convert.fuse_qkv(head_layout(6, 2, 4), 6, 2, WIDTH)(q, k, v).dtype == np.float16


def test_a_tensor_with_the_wrong_number_of_heads_is_refused():
    q, k, v = tensors(6, 2)
    with pytest.raises(ValueError, match="reshape"):
        convert.fuse_qkv(head_layout(6, 2, 1), 6, 2, WIDTH)(q[:-WIDTH], k, v)
