"""A token reads the vector of the token before it, however steps cut its sequence and whatever drafts were lost."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution import make_mesh
from jpaged.execution.caches.base import BlockSettings, HostStep, LayerCall
from jpaged.execution.caches.pool import PoolSpec, make_pool
from jpaged.execution.caches.previous_token import PreviousTokenBatch, PreviousTokenCache
from jpaged.model_api import PreviousTokenGroup
from jpaged.scheduling import ScheduledStep

SIZE, DRAFTS, WIDTH, TOKENS, SEQS, MOST = 8, 3, 40, 96, 4, 120
MESH = make_mesh(1)


def make_spec(pool_dtype="float32", dtype="float32") -> PoolSpec:
    settings = BlockSettings(SIZE, jnp.dtype(pool_dtype), 1, most_drafts=DRAFTS)
    cache = PreviousTokenCache(PreviousTokenGroup("previous", (0,), WIDTH, dtype), settings)
    return PoolSpec.plan([cache], 4 << 20)


@partial(jax.jit, static_argnums=0)
def operate(spec, pool, arrays, vectors):
    call = LayerCall(
        mesh=MESH,
        query_starts=np.zeros(1, np.int32),
        kv_lens=np.zeros(1, np.int32),
        arrays=arrays,
        views=spec.views,
        max_query_len=None,
        impl=None,
    )
    return spec.caches[0].operate(call, pool, 0, vectors)


def whole(spec, pool, arrays, vectors):
    pool, before = operate(spec, pool, arrays, vectors)
    return pool, np.asarray(before)


def by_launches(spec, pool, arrays, vectors):
    """Some tokens at a time, as deterministic steps are computed."""
    found = []
    for start in range(0, TOKENS, 16):
        rows = slice(start, start + 16)
        pool, before = operate(
            spec, pool, spec.caches[0].one_by_one(arrays, rows, np.zeros(16, np.int32)), vectors[rows]
        )
        found.append(np.asarray(before))
    return pool, np.concatenate(found)


@pytest.mark.parametrize("compute", [whole, by_launches])
@pytest.mark.parametrize(("pool_dtype", "dtype"), [("float32", "float32"), ("int8", "bfloat16")])
def test_a_token_reads_what_was_computed_for_the_one_before(compute, pool_dtype, dtype):
    rng, spec = np.random.default_rng(4), make_spec(pool_dtype, dtype)
    pool, pages = make_pool(spec, MESH), MOST // SIZE
    table = rng.permutation(SEQS * pages).reshape(SEQS, pages).astype(np.int32)
    known: list[list[np.ndarray]] = [[] for _ in range(SEQS)]
    compared = 0
    for _ in range(30):
        chosen = [seq for seq in range(SEQS) if len(known[seq]) + 24 < MOST and rng.random() < 0.8]
        lengths = np.array([rng.integers(1, 24) if rng.random() < 0.4 else rng.integers(1, DRAFTS + 2) for _ in chosen])
        if not chosen:
            continue
        starts = np.array([len(known[seq]) for seq in chosen])
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        step = HostStep(
            ScheduledStep(), starts, lengths, np.repeat(np.arange(len(chosen)), lengths), positions, TOKENS, SEQS
        )
        tables = np.full((SEQS, pages), -1, np.int32)
        tables[: len(chosen)] = table[chosen]
        vectors = np.asarray(jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), jnp.dtype(dtype)))
        arrays = spec.caches[0].batch(step, [tables], spec.layout.groups)
        pool, before = compute(spec, pool, arrays, vectors)
        row = 0
        for seq, length in zip(chosen, lengths, strict=True):
            for _ in range(length):
                want = known[seq][-1] if known[seq] else np.zeros(WIDTH)
                assert (before[row] == want).all()
                known[seq].append(vectors[row])
                row, compared = row + 1, compared + 1
            del known[seq][len(known[seq]) - rng.integers(0, min(int(length), DRAFTS + 1)) :]
    assert compared > 200


@pytest.mark.parametrize(("tokens", "seqs"), [(1, 1), (4, 4), (96, 4)])
def test_a_step_never_copies_the_pool(tokens, seqs):
    spec = make_spec().resized(64 << 20)
    step = jax.jit(partial(operate.__wrapped__, spec), donate_argnums=0)
    sizes = PreviousTokenBatch(seqs, seqs, seqs, tokens, tokens)
    arrays = PreviousTokenBatch(*(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes))
    vectors = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)
    memory = step.lower(jax.ShapeDtypeStruct(spec.shape, spec.dtype), arrays, vectors).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= spec.device_bytes
    assert memory.temp_size_in_bytes < 0.05 * spec.device_bytes


def test_a_block_is_small_and_a_prefix_may_end_at_each():
    (group,) = make_spec().layout.groups
    assert group.spec.num_layers == DRAFTS + 1
    assert list(group.spec.policy.possible_prefix([True, False, True], SIZE)) == [0, 1, 3]


def test_a_token_without_a_block_is_named():
    spec = make_spec()
    step = HostStep(ScheduledStep(), np.array([9]), np.array([1]), np.zeros(1, np.int64), np.array([9]), 8, 2)
    table = np.array([[-1, 3], [-1, -1]], np.int32)
    spec.caches[0].batch(step, [table], spec.layout.groups)
    step = step._replace(starts=np.array([8]), positions=np.array([8]))
    with pytest.raises(RuntimeError, match="a token of group previous has no block"):
        spec.caches[0].batch(step, [table], spec.layout.groups)


def test_a_group_without_width_is_refused():
    with pytest.raises(ValueError, match="'previous': width=0 must be positive"):
        PreviousTokenGroup("previous", (0,), 0)
