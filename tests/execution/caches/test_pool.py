"""The pool's shape, and that no group's block reaches into another's page."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution import make_mesh, make_pool, plan_pool
from jpaged.memory import SlidingWindow
from jpaged.model_api import AttentionGroup
from pallas_kernels.kv_write import kv_write

FULL = AttentionGroup("full", layers=(0, 2, 4), kv_heads=2, head_dim=64)
WINDOW = AttentionGroup("window", layers=(1, 3), kv_heads=2, head_dim=64, sliding_window=24)


def plan(*groups: AttentionGroup, pool_bytes: int = 1 << 20, **options):
    settings = {"block_size": 16, "dtype": jnp.dtype("float32"), "shards": 1, **options}
    return plan_pool(groups, pool_bytes=pool_bytes, **settings)


def test_the_pool_is_large_pages_of_128_lanes():
    spec = plan(FULL)
    block = 3 * 2 * 16 * 128 * 4
    assert spec.layout.page_bytes == block
    assert spec.shape == (1, (1 << 20) // block, 3 * 2 * 16, 128)
    assert spec.device_bytes == 4 * int(np.prod(spec.shape)) <= 1 << 20


@pytest.mark.parametrize(("head_dim", "tiles"), [(48, 1), (64, 1), (80, 2), (128, 2), (192, 4)])
def test_a_view_has_a_pages_own_shape(head_dim, tiles):
    group = AttentionGroup("full", layers=(0, 1), kv_heads=3, head_dim=head_dim)
    spec = plan(group)
    assert spec.views[0][1:] == (2, 3, tiles, 16, 128)
    assert np.prod(spec.views[0]) == np.prod(spec.shape)


def test_blocks_of_int8_on_a_tpu_are_whole_tiles():
    packed, tiled = (plan(FULL, block_size=64, dtype=jnp.dtype("int8"), tile=tile) for tile in (1, 8))
    assert packed.views[0][1:] == (3, 2, 1, 66, 128)
    assert tiled.views[0][1:] == (3, 2, 1, 72, 128)
    assert np.prod(tiled.views[0]) == np.prod(tiled.shape)


def test_each_shard_holds_its_own_heads_share():
    whole, half = plan(FULL, pool_bytes=1 << 20), plan(FULL, pool_bytes=1 << 19, shards=2)
    assert half.shape[0] == 2
    assert half.views[0][2] == 1 and whole.views[0][2] == 2
    assert half.layout.num_pages == whole.layout.num_pages
    assert half.device_bytes * 2 == whole.device_bytes


def test_bfloat16_holds_twice_the_blocks():
    assert plan(FULL, dtype=jnp.dtype("bfloat16")).views[0][0] == 2 * plan(FULL).views[0][0]


def test_groups_keep_their_names_windows_and_policies():
    spec = plan(FULL, WINDOW)
    assert [cache.group.name for cache in spec.caches] == [group.spec.name for group in spec.layout.groups]
    assert [cache.group for cache in spec.caches] == [FULL, WINDOW]
    assert spec.slices == (slice(0, 1), slice(1, 2))
    assert spec.layout.groups[1].spec.policy == SlidingWindow(24)


def test_a_pool_below_one_page_is_refused():
    with pytest.raises(ValueError, match="smaller than one large page"):
        plan(FULL, WINDOW, pool_bytes=1 << 14)


def test_the_pool_starts_empty_on_the_mesh():
    spec = plan(FULL)
    pool = make_pool(spec, make_mesh(1))
    assert pool.shape == spec.shape and pool.dtype == spec.dtype and not np.asarray(pool).any()


@pytest.mark.parametrize("writer", [0, 1])
def test_writing_every_slot_of_a_groups_pages_touches_no_other_page(writer):
    """Pages alternate between two groups of other block sizes; one writes all its blocks in all its layers."""
    spec = plan(FULL, WINDOW, pool_bytes=1 << 20)
    groups, layouts = (FULL, WINDOW), spec.layout.groups
    assert layouts[0].block_bytes != layouts[1].block_bytes
    marked = jnp.full(spec.shape, -1.0)
    mine = np.arange(writer, spec.layout.num_pages, 2)
    per_page, size = layouts[writer].blocks_per_page, layouts[writer].spec.block_size
    blocks = (mine[:, None] * per_page + np.arange(per_page)).ravel()
    slots = (blocks[:, None] * size + np.arange(size)).ravel().astype(np.int32)
    kv = jnp.ones((len(slots), groups[writer].kv_heads, groups[writer].head_dim))
    view = marked.reshape(spec.views[writer])
    for layer in range(len(groups[writer].layers)):
        view = kv_write(view, jnp.int32(layer), kv, 2 * kv, jnp.asarray(slots))
    after = np.asarray(view).reshape(spec.shape)[0]
    others = np.setdiff1d(np.arange(spec.layout.num_pages), mine)
    assert len(mine) >= 2 and len(others) >= 2
    assert (after[others] == -1).all(), "another group's page was written"
    if layouts[writer].padded_layers == len(groups[writer].layers):
        assert (after[mine] > 0).all(), "a page has bytes that belong to no slot"
