"""Measures this machine's matrix products and memory bandwidth, the yardsticks of benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def median_seconds(run: Callable[[], jax.Array], repeats: int = 7) -> float:
    """Return the median wall time of `run`, after one call that is not counted."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def calls_per_second(run: Callable[[], jax.Array], seconds: float) -> float:
    """Measure how often `run` is done in a second, kept up for `seconds`; bursts are faster on a machine that others
    share."""
    jax.block_until_ready(run())
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        jax.block_until_ready(run())
        calls += 1
    return calls / (time.perf_counter() - start)


def gemm_flops(size: int = 2048, *, seconds: float = 2.0) -> float:
    """Measure the FLOP/s that ``jnp.dot`` keeps up on two float32 matrices of ``size x size``."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    dot = jax.jit(jnp.dot)
    return 2 * size**3 * calls_per_second(lambda: dot(a, a), seconds)


def read_bandwidth(num_bytes: int = 512 << 20, *, seconds: float = 2.0) -> float:
    """Measure the bytes/s at which ``jnp.sum`` keeps reading a float32 array much larger than the caches."""
    a = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return a.nbytes * calls_per_second(lambda: total(a), seconds)
