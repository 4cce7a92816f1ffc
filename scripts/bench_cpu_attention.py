"""Measures attention on one core of a CPU, in processor time: chunks of prompts and decoding, by what KV is held in.

    taskset -c 1 .venv/bin/python scripts/bench_cpu_attention.py [float32 bfloat16 int8]

Heads are SmolLM2-135M's, 9 on 3 KV heads of 64, and blocks of 16 tokens lie anywhere. Each figure is the best of 2.5 s.
Cases "in turn" read a layer after the other, as a step does, so that none is left in the cache from the turn before.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.large_pages import use_large_pages
from pallas_kernels.layout import view_shape
from pallas_kernels.paged_attention import paged_attention

KV_HEADS, GROUP, WIDTH, BLOCK, SECONDS = 3, 3, 64, 16, 2.5
CASES = {
    "chunk of 64 at 3,000": (64, 1, 3000, 1),
    "chunk of 512 at 512": (512, 1, 512, 1),
    "chunk of 512 at 3,000": (512, 1, 3000, 1),
    "chunk of 512 at 6,000": (512, 1, 6000, 1),
    "decode of 3 at 6,000": (1, 3, 6000, 1),
    "decode of 64 at 200": (1, 64, 200, 1),
    "decode of 64 at 250, 12 layers in turn": (1, 64, 250, 12),
}
"""Queries of a sequence, sequences, tokens of each, and layers that are read in turn."""


def random_view(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Return random keys and values; codes of int8 with one scale."""
    if dtype != "int8":
        return jax.random.normal(jax.random.key(0), shape, dtype)
    codes = np.random.default_rng(0).integers(-100, 101, shape, np.int8)
    codes[..., BLOCK:, :] = np.frombuffer(np.float16(0.01).tobytes(), np.int8)[np.arange(shape[-1]) % 2]
    return jnp.asarray(codes)


def measure(queries: int, seqs: int, tokens: int, layers: int, dtype: str) -> float:
    """Return the seconds of one call."""
    rng = np.random.default_rng(0)
    pages = -(-tokens // BLOCK)
    shape = view_shape(seqs * pages, max(4, layers), KV_HEADS, WIDTH, BLOCK, dtype)
    view = random_view(shape, dtype)
    use_large_pages([view])  # as an engine's pool lies in them
    tables = np.full((seqs, 512), -1, np.int32)
    tables[:, :pages] = rng.permutation(seqs * pages).reshape(seqs, pages)
    starts, lens = np.arange(seqs + 1, dtype=np.int32) * queries, np.full(seqs, tokens, np.int32)
    q = jnp.asarray(rng.standard_normal((seqs * queries, KV_HEADS, GROUP, WIDTH), np.float32))
    batch = jnp.asarray(tables), jnp.asarray(starts), jnp.asarray(lens)
    most = 1 if queries == 1 else None
    numbers = [jnp.int32(number) for number in range(layers)]
    attend = jax.jit(lambda q, view, layer: paged_attention(q, view, layer, *batch, scale=0.125, max_query_len=most))
    attend(q, view, numbers[0]).block_until_ready()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        before = time.process_time()
        for number in numbers:
            attend(q, view, number).block_until_ready()
        best = min(best, (time.process_time() - before) / layers)
    return best


for dtype in sys.argv[1:] or ["float32"]:
    for name, (queries, seqs, tokens, layers) in CASES.items():
        seconds = measure(queries, seqs, tokens, layers, dtype)
        pairs = seqs * sum(range(tokens - queries + 1, tokens + 1))
        work = 4 * pairs * KV_HEADS * GROUP * WIDTH
        print(f"{dtype} {name}: {seconds * 1e6:.0f} us, {work / seconds / 1e9:.0f} GFLOP/s", flush=True)
