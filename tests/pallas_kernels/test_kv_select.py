"""KV selection against NumPy: which tokens each KV head keeps, where they lie then, and that nothing else moves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_codes import decode
from pallas_kernels.kv_select import Keep, attention_scores, kv_select
from pallas_kernels.layout import unpack_kv, view_shape

BLOCKS, LAYERS, HEADS, QUERIES, WINDOW, SIZE = 40, 2, 2, 3, 5, 8
KEEP = Keep(first=2, recent=6, pool=3)
LENGTH, PAGES = 107, 18
TABLE = np.r_[np.random.default_rng(7).permutation(BLOCKS)[:14], [-1] * 4].astype(np.int32)


def problem(head_dim=48, dtype=jnp.float32, seed=0):
    """(view, queries of the last tokens); memory that no token of the sequence lies in holds NaN."""
    random = np.random.default_rng(seed)
    view = random.normal(size=view_shape(BLOCKS, LAYERS, HEADS, head_dim, SIZE)).astype(np.float32)
    unused = np.setdiff1d(np.arange(BLOCKS), TABLE)
    view[unused] = np.nan
    view[TABLE[13], ..., LENGTH % SIZE :, :] = np.nan
    lanes = np.arange(128) % 64 if head_dim <= 64 else np.arange(128)
    view[..., lanes >= head_dim] = 0
    q = 2 * random.normal(size=(WINDOW, HEADS, QUERIES, head_dim)).astype(np.float32)
    return jnp.asarray(view, dtype), jnp.asarray(q)


def cached(view, layer, head_dim):
    """K and V of the sequence's slots, [slots, heads, head_dim] each, as float64."""
    rows = np.asarray(decode(view[np.maximum(TABLE, 0), layer]), np.float64)
    rows = rows.transpose(0, 3, 1, 2, 4).reshape(PAGES * SIZE, HEADS, -1, 128)
    return unpack_kv(rows, head_dim)


def expected_scores(k, q, *, scale, soft_cap=None, sinks=None):
    """[heads, LENGTH], by the definition."""
    logits = scale * np.einsum("whgd,khd->hwgk", np.asarray(q, np.float64), k[:LENGTH])
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    unseen = np.arange(LENGTH) > (LENGTH - WINDOW + np.arange(WINDOW))[:, None]
    weights = np.where(unseen[None, :, None], 0, np.exp(logits))
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(np.asarray(sinks, np.float64))[:, None, :, None]
    return (weights / total).sum(axis=(1, 2))


def expected_tokens(scores, budget):
    """Positions that each head keeps, by the definition."""
    kept = []
    for mine in scores:
        choice = mine[: LENGTH - KEEP.recent]
        smooth = [choice[max(0, i - KEEP.pool // 2) : i + KEEP.pool // 2 + 1].max() for i in range(len(choice))]
        between = sorted(range(KEEP.first, len(choice)), key=lambda i: (-smooth[i], i))
        top = between[: budget - KEEP.first - KEEP.recent]
        kept.append(sorted([*range(KEEP.first), *top, *range(LENGTH - KEEP.recent, LENGTH)]))
    return np.array(kept)


def same_bits(a, b):
    return np.array_equal(*(np.asarray(x).view(np.uint8) for x in (a, b)))


VARIANTS = {"plain": {}, "soft cap": {"soft_cap": 3.0}, "sinks": {"sinks": np.linspace(-1, 2, HEADS * QUERIES)}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_the_attention_that_the_last_queries_give(variant):
    options = dict(VARIANTS[variant])
    if "sinks" in options:
        options["sinks"] = jnp.asarray(options["sinks"].reshape(HEADS, QUERIES), jnp.float32)
    view, q = problem()
    run = jax.jit(partial(attention_scores, scale=0.3, **options))
    got = np.asarray(run(view, 1, q, TABLE, LENGTH))
    want = expected_scores(cached(view, 1, 48)[0], q, scale=0.3, **options)
    np.testing.assert_allclose(got[:, :LENGTH], want, rtol=1e-5, atol=1e-7)
    assert (got[:, LENGTH:] == 0).all()


@pytest.mark.parametrize(("head_dim", "dtype"), [(48, jnp.float32), (96, jnp.bfloat16), (64, jnp.uint8)])
@pytest.mark.parametrize("budget", [8, 24, 40])
def test_each_head_keeps_its_own_tokens_in_the_first_slots_and_nothing_else_moves(head_dim, dtype, budget):
    stored = jnp.float8_e4m3fn if dtype == jnp.uint8 else dtype
    view, q = problem(head_dim, stored, seed=budget)
    if dtype == jnp.uint8:
        view = jax.lax.bitcast_convert_type(view, jnp.uint8)
    k, v = cached(view, 1, head_dim)
    kept = expected_tokens(expected_scores(k, q, scale=0.3), budget)
    run = jax.jit(partial(kv_select, keep=KEEP, most=40, scale=0.3))
    after = run(view, 1, q, TABLE, LENGTH, budget)
    for got, before in zip(cached(after, 1, head_dim), (k, v), strict=True):
        for head in range(HEADS):
            np.testing.assert_array_equal(got[:budget, head], before[kept[head], head])
            np.testing.assert_array_equal(got[budget:LENGTH, head], before[budget:LENGTH, head])
    others = np.setdiff1d(np.arange(BLOCKS), TABLE)
    assert same_bits(after[:, 0], view[:, 0]) and same_bits(after[others], view[others])
    assert not np.array_equal(kept[0], kept[1]) or budget == 8


@pytest.mark.parametrize("budget", [LENGTH, LENGTH + 5])
def test_a_sequence_within_its_budget_is_left_as_it_is(budget):
    view, q = problem()
    after = jax.jit(partial(kv_select, keep=KEEP, most=LENGTH + 5, scale=0.3))(view, 1, q, TABLE, LENGTH, budget)
    assert same_bits(after, view)


def test_codes_with_scales_are_refused():
    view = jnp.zeros(view_shape(4, 1, HEADS, 48, SIZE, jnp.int8), jnp.int8)
    with pytest.raises(ValueError, match="no view of int8"):
        kv_select(view, 0, jnp.zeros((WINDOW, HEADS, QUERIES, 48)), TABLE, LENGTH, 8, keep=KEEP, most=8, scale=1.0)
