"""Checks a GPU's products of rows with their experts' matrices, as floats and as codes, against float64 NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.matmul import matmul_grouped
from pallas_kernels.platform import Impl, resolve_impl
from pallas_kernels.quantised import QuantisedMatrix
from pallas_kernels.quantised_matmul import quantised_matmul_grouped
from scripts.benchmarks.gpu_check.products import random_matrix

COUNTS = {"a decode": (3, 0, 1, 2, 0, 0, 1, 1), "a prompt": (130, 0, 7, 300, 64, 1, 0, 10)}
"""How many rows each expert has; three rows of no expert follow."""
TOLERANCE = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest error, as a share of the product's largest number."""
HELD = ("int8", "int4", "mxfp4", "fp8")


def checks(
    seed: int,
    *,
    impl: Impl | None = None,
    inputs: int = 1024,
    outputs: int = 1440,
    held: tuple[str, ...] = HELD,
    counts: tuple[str, ...] = tuple(COUNTS),
) -> Iterator[dict[str, Any]]:
    """Yield lines as `products.checks` does; arguments as there, and `counts` of `COUNTS`."""
    random = np.random.default_rng(seed)
    for what in counts:
        rows = np.asarray(COUNTS[what], np.int32)
        table = random.normal(size=(len(rows), inputs, outputs)).astype(np.float32)
        for dtype, limit in TOLERANCE.items():
            x, matrices = _rows(random, rows, inputs, dtype), jnp.asarray(table, dtype)
            got = jax.jit(partial(matmul_grouped, impl=resolve_impl(impl)))(x, matrices, rows)
            error = _error(x, np.asarray(matrices, np.float64), rows, got)
            yield {"check": f"experts, {what}, {dtype}", "error": error, "limit": limit}
        for name in held:
            each = [random_matrix(random, name, inputs, outputs) for _ in rows]
            codes: QuantisedMatrix = jax.tree.map(lambda *parts: jnp.stack(parts), *each)
            values = np.asarray(codes.dequantised(jnp.float32), np.float64)
            for dtype in ("float16", "bfloat16"):
                x = _rows(random, rows, inputs, dtype)
                got = jax.jit(partial(quantised_matmul_grouped, impl=resolve_impl(impl)))(x, codes, rows)
                error = _error(x, values, rows, got)
                yield {"check": f"experts, {what}, {name}, {dtype}", "error": error, "limit": TOLERANCE[dtype]}


def _rows(random: np.random.Generator, counts: np.ndarray, inputs: int, dtype: str) -> jax.Array:
    return jnp.asarray(random.normal(size=(counts.sum() + 3, inputs)), dtype)


def _error(x: jax.Array, values: np.ndarray, counts: np.ndarray, got: jax.Array) -> float:
    want = np.zeros((len(x), values.shape[2]))
    start = 0
    for expert, count in enumerate(counts):
        mine = slice(start, start + count)
        want[mine] = np.asarray(x[mine], np.float64) @ values[expert]
        start += count
    error = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
    return float(error) if np.isfinite(error) else np.inf
