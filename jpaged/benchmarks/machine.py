"""What this machine can do: the yardsticks of the other benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def median_seconds(run: Callable[[], jax.Array], repeats: int = 7) -> float:
    """Median wall time of `run`, after one call that is not counted."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def gemm_flops(size: int = 2048) -> float:
    """FLOP/s of ``jnp.dot`` on two float32 matrices of ``size x size``."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    dot = jax.jit(jnp.dot)
    return 2 * size**3 / median_seconds(lambda: dot(a, a))


def read_bandwidth(num_bytes: int = 512 << 20) -> float:
    """Bytes/s at which ``jnp.sum`` reads a float32 array much larger than the caches."""
    a = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return a.nbytes / median_seconds(lambda: total(a))
