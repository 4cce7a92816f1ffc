"""The one fact the kernels share: where K and V lie in a view."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layout import check_view, num_tiles, pack_kv, padded_head_dim, unpack_kv, view_shape


@pytest.mark.parametrize(
    ("head_dim", "padded", "tiles"),
    [(48, 64, 1), (64, 64, 1), (65, 128, 2), (80, 128, 2), (128, 128, 2), (256, 256, 4)],
)
def test_heads_are_padded_to_half_a_row_or_whole_rows(head_dim, padded, tiles):
    assert (padded_head_dim(head_dim), num_tiles(head_dim)) == (padded, tiles)
    assert view_shape(7, 2, 3, head_dim, 16) == (7, 2, 3, tiles, 16, 128)


def test_a_head_without_width_is_refused():
    with pytest.raises(ValueError, match="head_dim=0"):
        padded_head_dim(0)


@pytest.mark.parametrize("head_dim", [48, 64, 80, 128, 256])
def test_unpacking_gives_back_what_was_packed(head_dim):
    k, v = np.random.default_rng(0).normal(size=(2, 5, 3, head_dim)).astype(np.float32)
    k_again, v_again = unpack_kv(pack_kv(jnp.asarray(k), jnp.asarray(v)), head_dim)
    np.testing.assert_array_equal(k_again, k)
    np.testing.assert_array_equal(v_again, v)


def test_narrow_heads_share_a_row_and_padding_lanes_are_zero():
    ones = jnp.ones((1, 1, 48))
    row = np.asarray(pack_kv(ones, 2 * ones))[0, 0, 0]
    np.testing.assert_array_equal(row, [1] * 48 + [0] * 16 + [2] * 48 + [0] * 16)


def test_k_tiles_come_before_v_tiles():
    ones = jnp.ones((1, 1, 256))
    np.testing.assert_array_equal(np.asarray(pack_kv(ones, 2 * ones))[0, 0, :, 0], [1, 1, 2, 2])


def test_a_view_of_other_heads_is_refused():
    view = jnp.zeros(view_shape(4, 1, 2, 128, 16))
    check_view(view, kv_heads=2, head_dim=100)
    with pytest.raises(ValueError, match="head_dim=256"):
        check_view(view, kv_heads=2, head_dim=256)
