"""Converters place every head and column where the layout says, and zero elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.model_api import head_layout
from jpaged_models import weights as convert

EMBED, WIDTH = 5, 4


def tensors(num_heads, num_kv_heads):
    draw = np.random.default_rng(0).standard_normal
    return tuple(draw((heads * WIDTH, EMBED)) for heads in (num_heads, num_kv_heads, num_kv_heads))


def by_slot(layout, fused):
    """The fused matrix as [embed, kv_heads, q_per_kv + 2, head_dim]."""
    return np.asarray(fused).reshape(EMBED, layout.kv_heads, layout.q_per_kv + 2, WIDTH)


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_qkv_slots_hold_the_heads_the_layout_names(num_kv_heads, share, shards):
    num_heads = num_kv_heads * share
    layout = head_layout(num_heads, num_kv_heads, shards)
    q, k, v = tensors(num_heads, num_kv_heads)
    fused = by_slot(layout, convert.fuse_qkv(layout, num_heads, num_kv_heads, WIDTH)(q, k, v))
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
    fused = by_slot(layout, convert.fuse_qkv(layout, num_heads, num_kv_heads, WIDTH)(q, k, v))
    slots = np.einsum("te,ekqd->tkqd", x, fused)[:, :, :-2]
    back = slots.reshape(3, -1) @ convert.split_out(layout, num_heads, WIDTH)(out)
    np.testing.assert_allclose(back, x @ q.T @ out.T, atol=1e-12)


def test_biases_follow_their_heads():
    layout = head_layout(6, 2, 4)
    q, k, v = (tensor[:, 0] for tensor in tensors(6, 2))
    whole = convert.fuse_qkv(layout, 6, 2, WIDTH)
    np.testing.assert_array_equal(whole(q, k, v), np.asarray(whole(*tensors(6, 2)))[0])


def test_neighbours_that_rotate_together_come_to_lie_half_a_head_apart():
    layout = head_layout(6, 2, 1)
    q, k, v = tensors(6, 2)
    fused = by_slot(layout, convert.fuse_qkv(layout, 6, 2, WIDTH, rotates_neighbours=True)(q, k, v))
    plain = by_slot(layout, convert.fuse_qkv(layout, 6, 2, WIDTH)(q, k, v))
    np.testing.assert_array_equal(fused[:, :, :-1], plain[:, :, :-1, [0, 2, 1, 3]])
    np.testing.assert_array_equal(fused[:, :, -1], plain[:, :, -1])


def test_each_shard_holds_its_gate_columns_then_its_up_columns():
    gate = np.arange(1, 8)[:, None] * np.ones(EMBED)
    fused = convert.fuse_gate_up(convert.Padded(7, 2))(gate, 10 * gate)
    assert fused.shape == (EMBED, 16)
    columns = [1, 2, 3, 4, 10, 20, 30, 40, 5, 6, 7, 0, 50, 60, 70, 0]
    np.testing.assert_array_equal(fused, np.broadcast_to(columns, (EMBED, 16)))
    np.testing.assert_array_equal(convert.fuse_gate_up(convert.Padded(7, 2))(gate[:, 0], 10 * gate[:, 0]), columns)


def test_experts_columns_are_cut_and_padded_as_an_mlps_are():
    gate = np.arange(1, 8)[:, None] * np.ones(EMBED)
    both = np.stack([np.concatenate([gate, 10 * gate]).T, np.concatenate([gate, -gate]).T])
    fused = np.asarray(convert.split_gate_up(convert.Padded(7, 2))(both))
    np.testing.assert_array_equal(fused[0], convert.fuse_gate_up(convert.Padded(7, 2))(gate, 10 * gate))
    np.testing.assert_array_equal(fused[1], convert.fuse_gate_up(convert.Padded(7, 2))(gate, -gate))


def test_linear_is_transposed_and_padded_on_either_side():
    stored = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(convert.linear(3, 2)(stored), stored.T)
    both = convert.linear(convert.Padded(3, 2), convert.Padded(2, 3))
    np.testing.assert_array_equal(both(stored), np.pad(stored.T, ((0, 1), (0, 1))))


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("stored", [6, 8])
def test_an_axis_that_is_shorter_or_longer_than_the_config_says_is_refused(stored, shards):
    matrix, width = np.ones((EMBED, stored)), convert.Padded(7, shards)
    message = f"{stored} numbers along an axis where the config says 7"
    for converter, array in [
        (convert.linear(width, EMBED), matrix),
        (convert.linear(EMBED, width), matrix.T),
        (convert.pad_axis(1, width), matrix),
        (convert.stack_linear(inputs=width), matrix),
        (convert.stack_linear(outputs=width), matrix.T),
    ]:
        with pytest.raises(ValueError, match=message):
            converter(array)
    for fuse in (convert.fuse_gate_up(width), convert.stack_gate_up(width)):
        with pytest.raises(ValueError, match="do not make 7 columns each"):
            fuse(matrix.T, matrix.T)


def test_heads_are_padded_whole():
    rows = convert.Padded(3, 2, each=5)
    assert (rows.stored, rows.size) == (15, 20)


def test_one_shard_needs_no_padding():
    table = np.ones((211, EMBED))
    assert convert.pad_rows(211)(table) is table
    assert convert.vocab_rows(211, 211)(table) is table


def test_a_table_is_padded_for_shards_but_never_for_tokens_it_lacks():
    table = np.ones((210, EMBED))
    padded = np.asarray(convert.vocab_rows(210, 212)(table))
    np.testing.assert_array_equal(padded, np.pad(table, ((0, 2), (0, 0))))
    with pytest.raises(ValueError, match="vocab_size=211 in the config, but only 210 rows are stored"):
        convert.vocab_rows(211, 212)(table)


def test_the_stored_dtype_is_kept():
    q, k, v = (tensor.astype(np.float16) for tensor in tensors(6, 2))
    assert convert.fuse_qkv(head_layout(6, 2, 4), 6, 2, WIDTH)(q, k, v).dtype == np.float16


def test_a_tensor_with_the_wrong_number_of_heads_is_refused():
    q, k, v = tensors(6, 2)
    with pytest.raises(ValueError, match="reshape"):
        convert.fuse_qkv(head_layout(6, 2, 1), 6, 2, WIDTH)(q[:-WIDTH], k, v)
