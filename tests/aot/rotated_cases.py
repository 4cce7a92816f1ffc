"""Joined queries, keys and values rotated by Triton's interpreter, and how far they are from the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from triton_interpreter import interpret

from pallas_kernels.rotated_heads import HeadNorms, gpu, reference


class Joined(NamedTuple):
    """Tokens, KV heads, query heads of each, a head's width and its pairs, and whether queries and keys are normed."""

    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    half: int
    normed: bool = False


ROTATED = {
    "heads rotated": Joined(5, 3, 4, 128, 64),
    "heads rotated, odd group": Joined(3, 2, 7, 64, 32),
    "heads rotated in part, padded": Joined(2, 3, 1, 80, 16),
    "heads normed and rotated": Joined(3, 2, 4, 128, 64, normed=True),
    "heads normed, rotated in part, padded": Joined(2, 2, 2, 80, 16, normed=True),
}


def rotation_errors(chosen: Callable[[str], bool]) -> Iterator[tuple[str, float]]:
    """Yield the largest error of queries and keys of each chosen case; infinity where the values differ in a bit."""
    for name, (tokens, kv_heads, group, head_dim, half, normed) in ROTATED.items():
        for dtype in ("float32", "float16", "bfloat16"):
            if not chosen(f"{name}, {dtype}"):
                continue
            random = np.random.default_rng(len(name))
            joined = jnp.asarray(random.normal(size=(tokens, kv_heads, group + 2, head_dim)), dtype)
            angles = jnp.asarray(random.uniform(0, 60, (tokens, half)), jnp.float32)
            q, k = jnp.asarray(random.uniform(0.5, 1.5, (2, head_dim)), jnp.float32)
            norms = HeadNorms(q, k, eps=1e-6, offset=1.0) if normed else None
            arrays = joined, jnp.cos(angles), jnp.sin(angles), norms
            got, want = gpu.rotated_heads(*arrays, launch=interpret), reference.rotated_heads(*arrays)
            assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
            errors = [
                np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()
                for a, b in zip(got, want, strict=True)
            ]
            yield f"{name}, {dtype}", float(max(errors)) if errors[2] == 0 else np.inf
