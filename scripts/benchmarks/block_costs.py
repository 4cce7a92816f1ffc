"""Measures on this machine what blocks cost: attention over them, an engine's speed by their size, and moving them to
host memory against computing them again (PagedAttention, figures 18 and 19a)."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import LLM, SamplingParams
from jpaged.bench.prompts import Lengths, real_prompts
from jpaged.execution import make_pool
from jpaged.execution.caches.base import BlockSettings
from jpaged.execution.caches.pool import PoolSpec
from jpaged.execution.caches.registry import layer_caches
from jpaged.execution.mesh import make_mesh
from jpaged.execution.transfer.block_mover import BlockMover
from jpaged.execution.transfer.host_store import HostStore
from jpaged.model_api import AttentionGroup
from pallas_kernels.layout import pack_kv, view_shape
from pallas_kernels.paged_attention import paged_attention
from scripts.cases import Row, Rows

SIZES = [8, 16, 32, 64, 128, 256]


def best_of(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """Return the least seconds of each run; they take turns, after one turn that does not count."""
    best = [float("inf")] * len(runs)
    for turn in range(rounds + 1):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def block_attention(
    sequences: int = 16,
    context: int = 512,
    kv_heads: int = 3,
    q_per_kv: int = 3,
    head_dim: int = 64,
    sizes: list[int] = SIZES,
    rounds: int = 50,
) -> Rows:
    """Microseconds of a layer's decode attention over scattered blocks and over contiguous arrays (figure 18a).

    The contiguous side is XLA's: two products and a softmax over arrays that hold each sequence in one piece, of equal
    lengths, which suits it best. Both are float32; blocks lie in random order. "times" is paged over contiguous.
    """
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((sequences, kv_heads, q_per_kv, head_dim)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((sequences, kv_heads, context, head_dim)), jnp.float32) for _ in range(2))

    @jax.jit
    def contiguous(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("shqd,shtd->shqt", q, k) * head_dim**-0.5
        return jnp.einsum("shqt,shtd->shqd", jax.nn.softmax(scores), v)

    starts, lens = jnp.arange(sequences + 1, dtype=jnp.int32), jnp.full(sequences, context, jnp.int32)
    paged = jax.jit(
        lambda q, view, tables: paged_attention(q, view, 0, tables, starts, lens, scale=head_dim**-0.5, max_query_len=1)
    )
    rows = []
    for size in sizes:
        pages = -(-context // size)
        tables = rng.permutation(sequences * pages).reshape(sequences, pages)
        view = jnp.asarray(_scattered(np.asarray(k), np.asarray(v), tables, size))
        tables = jnp.asarray(tables, jnp.int32)
        np.testing.assert_allclose(paged(q, view, tables), contiguous(q, k, v), atol=1e-4)
        ours, theirs = best_of(rounds, lambda: paged(q, view, tables), lambda: contiguous(q, k, v))  # noqa: B023
        row = {"block size": size, "paged, us": 1e6 * ours, "contiguous, us": 1e6 * theirs}
        rows.append(row | {"times": ours / theirs})
    return rows


def _scattered(k: np.ndarray, v: np.ndarray, tables: np.ndarray, size: int) -> np.ndarray:
    """Return a view whose blocks hold keys and values, of shape [sequences, kv_heads, tokens, head_dim], where the
    tables say."""
    sequences, heads, tokens, width = k.shape
    short = ((0, 0), (0, tables.shape[1] * size - tokens), (0, 0), (0, 0), (0, 0))
    flat = (each.swapaxes(1, 2).reshape(-1, heads, width) for each in (k, v))
    rows = np.asarray(pack_kv(*map(jnp.asarray, flat)))
    rows = np.pad(rows.reshape(sequences, tokens, *rows.shape[1:]), short)
    view = np.zeros(view_shape(tables.size, 1, heads, width, size), np.float32)
    view[tables.ravel(), 0] = rows.reshape(tables.size, size, *rows.shape[2:]).transpose(0, 2, 3, 1, 4)
    return view


def block_sizes(
    model: str = "smollm2-135m",
    sizes: list[int] = [8, 16, 64, 256],  # noqa: B006 (never changed)
    num_prompts: int = 24,
    mean_input: float = 80,
    mean_output: float = 40,
    pool_tokens: int = 1024,
    rounds: int = 1,
) -> Rows:
    """Steps and latency of a batch by block size, in a pool of equal bytes that it does not fit (figure 18b).

    Lengths are lognormal and prefixes are not cached. All requests are there from the start; latency is the mean time
    from there to the end for a token of the output. Engines take turns, after a turn that does not count; the turn of
    the least latency of --rounds is shown. "times" is over blocks of 16, or of the first of --sizes.
    """
    engines = {}
    for size in sizes:
        settings = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256, "block_size": size}
        probe = LLM(model, kv_cache_memory_bytes=1 << 28, enforce_eager=True, enable_prefix_caching=False, **settings)
        pool = probe.memory_report().page_bytes * (pool_tokens // size)
        probe.close()
        engines[size] = LLM(model, kv_cache_memory_bytes=pool, enable_prefix_caching=False, **settings)
    pairs = Lengths(num_prompts, mean_input, mean_output, seed=0).draw(512)
    prompts = real_prompts(engines[sizes[0]].tokenizer, [prompt for prompt, _ in pairs])
    params = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in pairs]

    def turn(llm: LLM) -> Row:
        before, start = llm.stats(), time.monotonic()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        ends = [out.metrics.finished_time - start for out in outputs if out.metrics and out.metrics.finished_time]
        steps = llm.stats().num_steps - before.num_steps
        latency = mean(end / output for end, (_, output) in zip(ends, pairs, strict=True))
        preemptions = llm.stats().num_preemptions - before.num_preemptions
        return {"steps": steps, "preemptions": preemptions, "s/token": latency}

    turns = [{size: turn(llm) for size, llm in engines.items()} for _ in range(rounds + 1)][1:]
    best = {size: min((found[size] for found in turns), key=lambda row: row["s/token"]) for size in sizes}
    usual = best[16 if 16 in sizes else sizes[0]]["s/token"]
    return [{"block size": size, **row, "times": row["s/token"] / usual} for size, row in best.items()]


def swap_costs(
    model: str = "smollm2-135m",
    tokens: int = 256,
    sizes: list[int] = SIZES,
    layers: int = 30,
    kv_heads: int = 3,
    head_dim: int = 64,
    rounds: int = 10,
) -> Rows:
    """Milliseconds to move a sequence's blocks to host memory and back, against computing it again (figure 19a).

    Layers and heads are those of the demo model, in float32, of which the prompt of --tokens is computed.
    """
    settings = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    llm = LLM(model, dtype="float32", kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False, **settings)
    llm.warmup(use_tqdm=False)
    prompt, one = real_prompts(llm.tokenizer, [tokens]), SamplingParams(temperature=0.0, max_tokens=1)
    (again,) = best_of(rounds, lambda: len(llm.generate(prompt, one, use_tqdm=False)))
    llm.close()
    rows = []
    for size in sizes:
        group = AttentionGroup("full", tuple(range(layers)), kv_heads, head_dim)
        (cache,) = layer_caches([group], BlockSettings(size, np.dtype("float32"), 1))
        blocks = -(-tokens // size)
        spec = PoolSpec.plan([cache], 2 * blocks * cache.pool_groups()[0].real_bytes)
        mesh = make_mesh(1)
        store = HostStore(BlockMover(spec, mesh, lambda shape: None, lambda shape, seconds: None))
        pool = [make_pool(spec, mesh)]
        moves = [np.array([(0, i, i) for i in range(blocks)])]

        def move(pool: list[jax.Array] = pool, store: HostStore = store, moves: list[np.ndarray] = moves) -> jax.Array:
            store.swap_out(pool[0], moves)
            pool[0] = store.swap_in(pool[0], moves)
            return pool[0]

        (swapped,) = best_of(rounds, move)
        row = {"block size": size, "blocks": blocks, "out and in, ms": 1e3 * swapped, "computed, ms": 1e3 * again}
        rows.append(row | {"times": swapped / again})
    return rows
