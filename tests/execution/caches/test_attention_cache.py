"""Attention of a head that drafts blocks: each token of a step sees all of its sequence in the step, on every route."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thorough import rarely

from jpaged.execution import make_mesh
from jpaged.execution.caches.attention import AttentionBatch, FullAttentionCache, SlidingWindowCache, writes_within
from jpaged.execution.caches.base import BlockSettings, LayerCall
from jpaged.execution.caches.pool import PoolSpec
from jpaged.model_api import AttentionGroup

MESH = make_mesh(1)
SIZE, HEADS, QUERIES, WIDTH, TOKENS = 8, 2, 3, 16, 12
LENGTHS, QUERY_LENGTHS = (9, 6, 19, 0), (3, 1, 4, 0)
"""Tokens of each sequence after the step, and in it; the last sequence is padding, and so are the last tokens."""
TABLE = np.array([[3, 1, -1], [7, -1, -1], [2, 5, 0], [-1, -1, -1]], np.int32)


def call_of(cache, spec, impl, lengths, query_lengths, padded, **limits):
    """The call of a step of the last tokens of each sequence, with the plan that causal layers share."""
    slots = np.full(padded, spec.views[0][0] * SIZE, np.int32)
    ends = np.cumsum(query_lengths)
    for seq, (stop, count) in enumerate(zip(lengths, query_lengths, strict=True)):
        at = np.arange(stop - count, stop)
        slots[ends[seq] - count : ends[seq]] = TABLE[seq, at // SIZE] * SIZE + at % SIZE
    call = LayerCall(
        mesh=MESH,
        query_starts=np.append(0, ends).astype(np.int32),
        kv_lens=np.array(lengths, np.int32),
        arrays=AttentionBatch(TABLE, slots),
        views=spec.views,
        max_query_len=limits.pop("max_query_len", None),
        impl=impl,
        **limits,
    )
    return replace(call, prepared=cache.prepare(call, padded))


@pytest.mark.parametrize(
    ("impl", "window"),
    [
        *(("cpu", None), ("cpu", 6), ("xla", 6), ("tpu_interpret", 6)),
        *(rarely("xla", None), rarely("tpu_interpret", None), rarely("reference", None), rarely("reference", 6)),
    ],
)
def test_a_token_that_sees_ahead_sees_all_that_its_sequence_has_in_the_step(impl, window):
    """A window shows what lies before a token as ever."""
    kind = FullAttentionCache if window is None else SlidingWindowCache
    group = AttentionGroup("full", (0, 1), HEADS, WIDTH, sliding_window=window, q_per_kv=QUERIES)
    cache = kind(group, BlockSettings(SIZE, jnp.dtype("float32"), 1))
    spec = PoolSpec.plan([cache], 9 * cache.pool_groups()[0].real_bytes)
    pool = jnp.zeros(spec.shape)
    keys, values = np.asarray(jax.random.normal(jax.random.key(1), (2, len(LENGTHS), max(LENGTHS), HEADS, WIDTH)))
    q = np.asarray(jax.random.normal(jax.random.key(2), (TOKENS, HEADS, QUERIES, WIDTH)))

    def rows_of(part, lengths, counts, padded):
        live = [part[seq, stop - count : stop] for seq, (stop, count) in enumerate(zip(lengths, counts, strict=True))]
        found = np.concatenate(live)
        return np.pad(found, ((0, padded - len(found)), (0, 0), (0, 0)))

    known = [stop - count for stop, count in zip(LENGTHS, QUERY_LENGTHS, strict=True)]
    before = call_of(cache, spec, impl, known, known, 40)
    kv = [rows_of(part, known, known, 40) for part in (keys, values)]
    pool, _ = cache.operate(before, pool, 1, jnp.zeros((40, HEADS, QUERIES, WIDTH)), *kv, scale=0.3)
    call = call_of(cache, spec, impl, LENGTHS, QUERY_LENGTHS, TOKENS)
    kv = [rows_of(part, LENGTHS, QUERY_LENGTHS, TOKENS) for part in (keys, values)]
    _, out = cache.operate(call, pool, 1, q, *kv, scale=0.3, sees_ahead=True)

    row = 0
    for seq, (stop, count) in enumerate(zip(LENGTHS, QUERY_LENGTHS, strict=True)):
        for position in range(stop - count, stop):
            first = 0 if window is None else max(0, position - window + 1)
            scores = 0.3 * np.einsum("hqd,khd->hqk", q[row], keys[seq, first:stop])
            wanted = np.einsum("hqk,khd->hqd", jax.nn.softmax(scores, axis=-1), values[seq, first:stop])
            np.testing.assert_allclose(out[row], wanted, atol=1e-5)
            row += 1
    assert not np.any(out[row:])


GROUP = AttentionGroup("full", (0, 1), 1, WIDTH, q_per_kv=QUERIES)


def test_tokens_alone_of_their_sequences_are_written_within_the_attention_on_tpus():
    cache = FullAttentionCache(GROUP, BlockSettings(SIZE, jnp.dtype("float32"), 1))
    spec = PoolSpec.plan([cache], 9 * cache.pool_groups()[0].real_bytes)
    pool, q = jnp.ones(spec.shape), jax.random.normal(jax.random.key(1), (4, 1, QUERIES, WIDTH))
    k, v = jax.random.normal(jax.random.key(2), (2, 4, 1, WIDTH))
    found = []
    for impl in ("tpu_interpret", "xla"):
        call = call_of(cache, spec, impl, LENGTHS, (1, 1, 1, 0), 4, max_query_len=1, alone=True)
        assert call.prepared.writes is None
        found.append(jax.jit(lambda pool, call=call: cache.operate(call, pool, 1, q, k, v, scale=0.3))(pool))
    (written, out), (wanted, near) = found
    assert np.asarray(written).tobytes() == np.asarray(wanted).tobytes() != np.asarray(pool).tobytes()
    np.testing.assert_allclose(out, near, atol=1e-5)


def test_tokens_that_may_have_a_sequence_in_common_are_written_before_any_attends():
    """As in a deterministic launch, where a prompt's tokens are sequences of their own."""
    cache = FullAttentionCache(GROUP, BlockSettings(SIZE, jnp.dtype("float32"), 1))
    spec = PoolSpec.plan([cache], 9 * cache.pool_groups()[0].real_bytes)
    call = call_of(cache, spec, "tpu_interpret", LENGTHS, (1, 1, 1, 0), 4, max_query_len=1)
    assert not writes_within(call) and call.prepared.writes is not None
    assert writes_within(replace(call, alone=True))
    assert not writes_within(replace(call, alone=True, impl="cpu"))
    assert not writes_within(replace(call, alone=True, max_query_len=None))
