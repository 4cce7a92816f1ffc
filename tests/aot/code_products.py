"""Products with codes by Triton's interpreter, and how far they are from those in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from triton_interpreter import interpret

from pallas_kernels.gpu_launch import compiling_for
from pallas_kernels.quantised import E2M1_PAIRS, FLOAT8, INT8, UINT4_PAIRS, QuantisedMatrix
from pallas_kernels.quantised_matmul.gpu import multiply_held, multiply_held_groups, takes


class Held(NamedTuple):
    """Rows, the matrix' sizes, the values of a group (0: all), dtypes of codes and scales, and the rest of its form."""

    rows: int
    inputs: int
    outputs: int
    group: int
    codes: type
    scales: type
    minimums: bool
    axis: int = -2
    e2m1: bool = False


CODECS = {np.uint8: UINT4_PAIRS, np.int8: INT8, ml_dtypes.float8_e4m3fn: FLOAT8}
PRODUCTS = {
    "4 bits, one row": Held(1, 64, 40, 32, np.uint8, np.float16, True),
    "4 bits, columns that fill no tile": Held(16, 96, 72, 32, np.uint8, np.float16, True),
    "4 bits, several tiles of rows": Held(130, 128, 40, 64, np.uint8, np.float32, True),
    "4 bits, groups of 128": Held(3, 512, 32, 128, np.uint8, np.float16, True),
    "4 bits, inputs shared out": Held(2, 2048, 64, 32, np.uint8, np.float32, True),
    "4 bits, a table": Held(5, 96, 72, 32, np.uint8, np.float16, True, axis=-1),
    "int8": Held(3, 192, 72, 0, np.int8, np.float32, False),
    "int8, inputs shared out": Held(1, 2048, 64, 0, np.int8, np.float32, False),
    "int8, a table": Held(20, 192, 72, 0, np.int8, np.float32, False, axis=-1),
    "int8, groups of 16 with minimums": Held(3, 96, 40, 16, np.int8, np.float16, True),
    "int8, groups of 32": Held(3, 96, 40, 32, np.int8, np.float16, False),
    "float8": Held(3, 192, 72, 0, ml_dtypes.float8_e4m3fn, np.float32, False),
    "MXFP4": Held(3, 96, 40, 32, np.uint8, np.uint8, False, e2m1=True),
}
EXPERTS = {
    "4 bits": Held(0, 96, 72, 32, np.uint8, np.float16, True),
    "MXFP4": Held(0, 96, 72, 32, np.uint8, np.uint8, False, e2m1=True),
    "int8": Held(0, 192, 72, 0, np.int8, np.float32, False),
}
COUNTS = {
    "experts": [40, 0, 3, 90, 17],
    "no rows of experts": [0, 0, 0],
    "more experts than rows": [0] * 30 + [2, 0, 1],
}
"""How many rows each expert has; three rows of no expert follow."""


def random_matrix(held: Held, random: np.random.Generator) -> QuantisedMatrix:
    groups, packed = held.inputs // (held.group or held.inputs), held.codes is np.uint8
    shape, few = [held.inputs // (2 if packed else 1), held.outputs], [groups, held.outputs]
    exponents = random.integers(118, 126, few)
    scales = (exponents if held.e2m1 else random.uniform(0.001, 0.1, few)).astype(held.scales)
    minimums = (-8.0 * packed * scales + random.normal(size=few) / 50).astype(held.scales) if held.minimums else None
    if held.codes is ml_dtypes.float8_e4m3fn:
        codes = random.normal(size=shape).astype(held.codes)
    else:
        codes = random.integers(0 if packed else -127, 256 if packed else 128, shape).astype(held.codes)
    parts = [part if part is None or held.axis == -2 else part.T.copy() for part in (codes, scales, minimums)]
    codec = E2M1_PAIRS if held.e2m1 else CODECS[held.codes]
    return QuantisedMatrix(*(None if part is None else jnp.asarray(part) for part in parts), held.axis, codec)


def product_errors(chosen: Callable[[str], bool]) -> Iterator[tuple[str, float]]:
    """Yield the largest error of each chosen case, as a share of the largest number of the product."""
    for name, held in PRODUCTS.items():
        for dtype in ("float16", "bfloat16"):
            if not chosen(f"product, {name}, {dtype}"):
                continue
            random = np.random.default_rng(len(name))
            matrix = random_matrix(held, random)
            x = jnp.asarray(random.normal(size=(held.rows, held.inputs)) + 1, dtype)  # rows whose sums are far from 0
            with compiling_for(90):
                assert takes(x, matrix), name
                got = multiply_held(x, matrix, x.dtype, launch=interpret)
            assert got.dtype == x.dtype
            values = np.asarray(matrix.dequantised(jnp.float32), np.float64)
            want = np.asarray(x, np.float64) @ (values if held.axis == -2 else values.T)
            error = np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()
            yield f"product, {name}, {dtype}", float(error)


def expert_errors(chosen: Callable[[str], bool]) -> Iterator[tuple[str, float]]:
    """Yield the largest error of products of rows with their experts' codes, likewise."""
    for name, held in EXPERTS.items():
        for what, counts in COUNTS.items():
            for dtype in ("float16", "bfloat16"):
                if not chosen(f"{what}, {name}, {dtype}"):
                    continue
                random = np.random.default_rng(len(what))
                table = jax.tree.map(lambda *parts: jnp.stack(parts), *(random_matrix(held, random) for _ in counts))
                x = jnp.asarray(random.normal(size=(sum(counts) + 3, held.inputs)) + 1, dtype)
                with compiling_for(90):
                    assert takes(x, table), name
                    got = multiply_held_groups(x, table, jnp.asarray(counts), launch=interpret)
                values = np.asarray(table.dequantised(jnp.float32), np.float64)
                expert = np.repeat(np.arange(len(counts)), counts)
                want = np.zeros((len(x), held.outputs))
                want[: len(expert)] = np.einsum("ri,rio->ro", np.asarray(x, np.float64)[: len(expert)], values[expert])
                error = np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1e-30)
                yield f"{what}, {name}, {dtype}", float(error)
