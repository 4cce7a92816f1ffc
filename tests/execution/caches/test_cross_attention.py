"""Layers that read images: each token sees its own image, or the part of it that is not behind it, however they run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thorough import rarely

from jpaged.execution import make_mesh
from jpaged.execution.caches import cross_attention
from jpaged.execution.caches.base import BlockSettings, LayerCall
from jpaged.execution.caches.cross_attention import CrossAttentionBatch, CrossAttentionCache
from jpaged.execution.caches.pool import PoolSpec
from jpaged.model_api import CrossAttentionGroup

MESH = make_mesh(1)
SIZE, HEADS, WIDTH = 8, 2, 16
SEEN = np.array([0, 11, 11, 11, 0, 0, 21, 30, 5], np.int32)
"""The features that each of nine tokens sees; the last token stands for a sequence of one."""
STARTS = np.array([0, 4, 8, 9, 9], np.int32)
IMAGES = [(0, [3, 1], 11), (1, [7, 2, 5, 0], 30), (2, [6], 5)]
"""(sequence, blocks, features)."""


@pytest.fixture(scope="module")
def written():
    """The cache, its pool with all images written, and their keys and values by sequence."""
    cache = CrossAttentionCache(
        CrossAttentionGroup("images", (1, 3), HEADS, WIDTH, 8), BlockSettings(SIZE, jnp.dtype("float32"), 1)
    )
    spec = PoolSpec.plan([cache], 9 * cache.pool_groups()[0].real_bytes)
    pool, known = jnp.full(spec.shape, jnp.nan), {}
    for seq, blocks, count in IMAGES:
        k, v = jax.random.normal(jax.random.key(seq), (2, 2, count + 3, HEADS, WIDTH))
        place = np.arange(count)
        rows = np.append(np.array(blocks)[place // SIZE] * SIZE + place % SIZE, [np.iinfo(np.int32).max] * 2)
        pool = cache.write(MESH, spec.views[0], pool, (k, v), rows.astype(np.int32), "xla")
        known[seq] = k[:, :count], v[:, :count]
    return cache, spec, pool, known


def call_of(spec, impl, starts=STARTS, seen=SEEN, longest=None):
    table = np.full((len(starts) - 1, 4), -1, np.int32)
    for seq, blocks, _ in IMAGES:
        table[seq, : len(blocks)] = blocks
    return LayerCall(
        mesh=MESH,
        query_starts=starts,
        kv_lens=np.ones(len(starts) - 1, np.int32),
        arrays=CrossAttentionBatch(table, seen),
        views=spec.views,
        max_query_len=longest,
        impl=impl,
    )


def attended(q, known, layer, seq, seen):
    """One token's result, by plain softmax."""
    k, v = (part[layer, :seen] for part in known[seq])
    weights = jax.nn.softmax(0.3 * jnp.einsum("hgd,khd->hgk", q, k), axis=-1)
    return jnp.einsum("hgk,khd->hgd", weights, v)


@pytest.mark.parametrize(
    ("impl", "at_once"),
    [("xla", 1), rarely("reference", 1), rarely("tpu_interpret", 64), ("tpu_interpret", 4)],
)
def test_tokens_see_as_much_of_their_image_as_they_are_told(written, impl, at_once, monkeypatch):
    monkeypatch.setattr(cross_attention, "_TABLE_IDS", 4 * at_once)
    cache, spec, pool, known = written
    q = jax.random.normal(jax.random.key(9), (12, HEADS, 3, WIDTH))
    seen = np.append(SEEN, [0, 0, 0]).astype(np.int32)  # padding
    _, (out, sees) = cache.operate(call_of(spec, impl, seen=seen), pool, 1, q, scale=0.3)
    np.testing.assert_array_equal(sees, seen > 0)
    for token, (seq, many) in enumerate(zip([0] * 4 + [1] * 4 + [2] + [3] * 3, seen, strict=True)):
        wanted = attended(q[token], known, 1, seq, many) if many else jnp.zeros_like(q[token])
        np.testing.assert_allclose(out[token], wanted, atol=1e-5)


@pytest.mark.parametrize("impl", ["xla", pytest.param("tpu_interpret", marks=pytest.mark.nightly)])
def test_tokens_that_are_generated_see_their_image(written, impl):
    cache, spec, pool, known = written
    q = jax.random.normal(jax.random.key(9), (4, HEADS, 3, WIDTH))
    call = call_of(spec, impl, np.array([0, 1, 2, 3, 3]), np.array([11, 30, 0, 0]), 1)
    _, (out, _) = cache.operate(call, pool, 0, q, scale=0.3)
    for seq, many in ((0, 11), (1, 30)):
        np.testing.assert_allclose(out[seq], attended(q[seq], known, 0, seq, many), atol=1e-5)
    assert not out[2:].any()


def test_a_step_without_images_reads_nothing(written):
    cache, spec, pool, _ = written
    call = LayerCall(**(vars(call_of(spec, "xla")) | {"arrays": CrossAttentionBatch()}))
    assert cache.operate(call, pool, 0, jnp.ones((3, HEADS, 1, WIDTH)), scale=1.0) == (pool, None)
