"""Checks a GPU's products with codes against float64 NumPy, on fresh random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.platform import Impl
from pallas_kernels.quantised import E2M1_PAIRS, FLOAT8, INT8, UINT4_PAIRS, QuantisedMatrix
from pallas_kernels.quantised_matmul import quantised_matmul, quantised_matmul_table

ROWS = (1, 16, 64, 200, 320)
"""With the last of them float8 multiplies rows that are rounded to float8, too."""
HELD = {"int4": jnp.uint8, "mxfp4": jnp.uint8, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
GROUP = 32
TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}
"""Largest error, as a share of the product's largest number; weights that XLA makes of codes are rounded."""
FLOAT8_ROWS, FLOAT8_TOLERANCE = 256, 3e-2
"""Rows above which those that meet float8 may be rounded to it, and the error that is allowed then."""


def checks(
    seed: int,
    *,
    impl: Impl | None = None,
    inputs: int = 2048,
    outputs: int = 3000,
    held: tuple[str, ...] = tuple(HELD),
    numbers: tuple[int, ...] = ROWS,
) -> Iterator[dict[str, Any]]:
    """Yield one line for each product: name, largest error, and the error that is allowed.

    Args:
        impl: which kernels; None = what this platform runs.
        held: names of `HELD`.
        numbers: how many rows to multiply.
    """
    random = np.random.default_rng(seed)
    for name in held:
        matrix = random_matrix(random, name, inputs, outputs)
        values = np.asarray(matrix.dequantised(jnp.float32), np.float64)
        table = matrix.T if matrix.scales_follow else None
        for dtype, limit in TOLERANCE.items():
            for rows in numbers:
                x = jnp.asarray(random.normal(size=(rows, inputs)), dtype)
                want = np.asarray(x, np.float64) @ values
                found = {"product": jax.jit(partial(quantised_matmul, impl=impl))(x, [matrix])}
                if table is not None:
                    found["table"] = jax.jit(partial(quantised_matmul_table, impl=impl))(x, table)
                for what, got in found.items():
                    error = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
                    line = f"{what}, {name}, {rows} rows of {dtype}"
                    allowed = max(limit, FLOAT8_TOLERANCE) if name == "fp8" and rows > FLOAT8_ROWS else limit
                    yield {"check": line, "error": float(error) if np.isfinite(error) else np.inf, "limit": allowed}


def random_matrix(random: np.random.Generator, name: str, inputs: int, outputs: int) -> QuantisedMatrix:
    """Return random codes [inputs, outputs] of one of `HELD`, with their scales."""
    if name == "mxfp4":
        codes = jnp.asarray(random.integers(0, 256, (inputs // 2, outputs)), jnp.uint8)
        exponents = jnp.asarray(random.integers(118, 126, (inputs // GROUP, outputs)), jnp.uint8)
        return QuantisedMatrix(codes, exponents, None, codec=E2M1_PAIRS)
    if name == "int4":
        codes = jnp.asarray(random.integers(0, 256, (inputs // 2, outputs)), jnp.uint8)
        scales = random.uniform(0.001, 0.01, (inputs // GROUP, outputs)).astype(np.float16)
        minimums = (-7.5 * scales).astype(np.float16)
        return QuantisedMatrix(codes, jnp.asarray(scales), jnp.asarray(minimums), codec=UINT4_PAIRS)
    wide = random.integers(-127, 128, (inputs, outputs)) if name == "int8" else random.normal(size=(inputs, outputs))
    scales = random.uniform(0.001, 0.01, (1, outputs)).astype(np.float32)
    codec = INT8 if name == "int8" else FLOAT8
    return QuantisedMatrix(jnp.asarray(wide, HELD[name]), jnp.asarray(scales), codec=codec)
