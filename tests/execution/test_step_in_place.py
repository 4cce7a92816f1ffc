"""The pool is updated in place: the compiled step aliases it and needs far less memory than it beside it.

Regression: a step of one token once copied the whole pool.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import plan, tiny_llama

from jpaged import PyramidKV
from jpaged.execution import Bucket, make_mesh, make_step
from jpaged.execution.batch import empty_batch
from jpaged.execution.caches.pool import plan_pool
from jpaged.execution.step import make_block_copy

MAX_SEQS = 8
MODELS = {
    "two KV heads of 64": {"layers": 4},
    "one KV head of 64": {"layers": 4, "heads": 4, "kv_heads": 1},
    "one KV head of 128": {"layers": 4, "heads": 2, "kv_heads": 1, "head_dim": 128},
    "stacked": {"layers": 4, "stacked": True},
}
BUCKETS = [Bucket(1, 1, True), Bucket(2, 2, True), Bucket(8, 8, True), Bucket(64, 8, False)]


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request):
    graphdef, params, groups = tiny_llama(**MODELS[request.param])
    return graphdef, params, plan(groups, 3000, block_size=16)


def assert_in_place(compiled, spec) -> None:
    memory = compiled.memory_analysis()
    assert spec.device_bytes > 64 << 20
    assert memory.alias_size_in_bytes >= spec.device_bytes
    assert memory.temp_size_in_bytes < 0.05 * spec.device_bytes


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_step_never_copies_the_pool(model, bucket):
    graphdef, params, spec = model
    pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    last = jax.ShapeDtypeStruct((MAX_SEQS,), jnp.int32)
    step = make_step(graphdef, spec, make_mesh(1))
    batch = empty_batch(bucket, spec, max_num_seqs=MAX_SEQS, max_model_len=256)
    lowered = step.lower(params, pool, batch, last, decode_only=bucket.decode_only)
    assert_in_place(lowered.compile(), spec)


def test_a_step_that_cuts_prompts_down_never_copies_the_pool(model):
    graphdef, params, whole = model
    bucket = Bucket(64, 8, False)
    groups = PyramidKV(budget=64).apply([cache.group for cache in whole.caches])
    spec = plan_pool(groups, block_size=16, dtype=whole.dtype, shards=1, pool_bytes=whole.device_bytes)
    pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    last = jax.ShapeDtypeStruct((MAX_SEQS,), jnp.int32)
    batch = empty_batch(bucket, spec, max_num_seqs=MAX_SEQS, max_model_len=256)
    step = make_step(graphdef, spec, make_mesh(1))
    assert_in_place(step.lower(params, pool, batch, last, decode_only=False).compile(), spec)


def test_a_block_copy_never_copies_the_pool(model):
    _, _, spec = model
    pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    ids = np.full((1, 16), -1, np.int32)
    assert_in_place(make_block_copy(spec, make_mesh(1)).lower(pool, ids, ids).compile(), spec)
