"""Measures products with bfloat16 and quantised matrices on a CPU against float32, in one run, each the best of several
turns.

    .venv/bin/python scripts/bench_products.py [--rows 1 8 64]

The shapes are those of SmolLM2-135M's MLP; each figure is a mean over as many different matrices as keep them out of
the caches for float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bfloat16_matmul import bfloat16_matmul
from pallas_kernels.matmul import matmul
from pallas_kernels.quantised import QuantisedMatrix
from pallas_kernels.tiled import tiled
from pallas_kernels.tiled_floats import tiled_floats
from pallas_kernels.tiled_matmul import tiled_matmul

SHAPES = (576, 3072), (1536, 576)
MATRICES, TURNS, GROUP = 16, 9, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="rows that are multiplied (1 8 64)")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    print("| matrix | rows | float32 | bfloat16 | times | int8 | times | int4 | times |\n|" + "---|" * 9)
    for inputs, outputs in SHAPES:
        forms = _forms(rng, inputs, outputs)
        for rows in args.rows:
            x = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32)
            best = dict.fromkeys(forms, float("inf"))
            for _ in range(TURNS):
                for name, (run, matrices) in forms.items():
                    best[name] = min(best[name], _seconds(run, x, matrices))
            of = {name: best["float32"] / seconds for name, seconds in best.items()}
            speeds = {name: f"{2e-9 * rows * inputs * outputs / seconds:.0f}" for name, seconds in best.items()}
            narrow = " | ".join(f"{speeds[name]} | {of[name]:.1f}" for name in forms if name != "float32")
            print(f"| {inputs} x {outputs} | {rows} | {speeds['float32']} | {narrow} |", flush=True)


def _forms(rng: np.random.Generator, inputs: int, outputs: int) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Return for each form the loop over its matrices, and these."""

    def held(matrix: Any) -> Any:
        return jax.tree.map(jnp.asarray, matrix)

    ones = np.ones((inputs // GROUP, outputs), np.float16)
    plain = [jnp.asarray(rng.standard_normal((inputs, outputs)), jnp.float32) for _ in range(MATRICES)]
    int8, int4 = [], []
    for _ in range(MATRICES):
        codes = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
        int8.append(held(tiled(QuantisedMatrix(codes, np.ones((1, outputs), np.float32)))))
        codes = rng.integers(0, 256, (inputs // 2, outputs)).astype(np.uint8)
        int4.append(held(tiled(QuantisedMatrix(codes, ones, ones, packed=True))))
    floats = _over_all(lambda x, matrices, number: matmul(x, matrices, number, impl="cpu"))
    whole = _over_all(lambda x, matrices, number: tiled_matmul(x, matrices, number))
    halves = [held(tiled_floats(np.asarray(matrix), -2)) for matrix in plain]
    pairs = _over_all(lambda x, matrices, number: bfloat16_matmul(x, matrices, number))
    return {"float32": (floats, plain), "bfloat16": (pairs, halves), "int8": (whole, int8), "int4": (whole, int4)}


def _over_all(product: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, matrices: list[Any]) -> Any:
        def turn(total: Any, number: Any) -> Any:
            return total + product(x, matrices, number)[:, :8].sum(), None

        return jax.lax.scan(turn, jnp.float32(0), jnp.arange(len(matrices)))[0]

    return jax.jit(run)


def _seconds(run: Callable[..., Any], x: Any, matrices: list[Any]) -> float:
    """Return the seconds of a product, after a run that warms up."""
    run(x, matrices).block_until_ready()
    start = time.perf_counter()
    run(x, matrices).block_until_ready()
    return (time.perf_counter() - start) / len(matrices)


if __name__ == "__main__":
    main()
