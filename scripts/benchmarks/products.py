"""Measures products with bfloat16 and quantised matrices on a CPU against float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.bfloat16_matmul import bfloat16_matmul
from pallas_kernels.cpu_features import best_kind, kind_in_registers
from pallas_kernels.matmul import matmul, matmul_table
from pallas_kernels.panelled_floats import panelled_floats
from pallas_kernels.products import multiply
from pallas_kernels.quantised import UINT4_PAIRS, QuantisedMatrix
from pallas_kernels.screened_argmax import make_screen, screened_argmax
from pallas_kernels.tiled import tiled
from pallas_kernels.tiled_floats import tiled_floats
from pallas_kernels.tiled_matmul import tiled_matmul
from scripts.cases import Rows

SHAPES = {(576, 3072): 16, (1536, 576): 16, (576, 49152): 2}
"""Inputs and outputs of a matrix, and how many there are."""
TURNS, GROUP = 9, 32
FORMS = ("panels", "table", "argmax", "compact", "bfloat16", "int8", "int4")
WITHOUT_AMX = "int8 without AMX"
"""A form that is int8 again where the processor has no AMX."""


def products(
    rows: list[int] = [1, 8, 64],  # noqa: B006 (never changed)
    forms: list[str] = list(FORMS),  # noqa: B006
    matrices: int = 1,
    processor_time: bool = False,
) -> Rows:
    """GFLOP/s of products with matrices of SmolLM2-135M's shapes, and how many times float32's speed they are.

    A figure is the best of several turns over so many matrices that float32's are not in the caches; --matrices 3 keeps
    int8 out too. "panels" is float32 in panels, "table" transposed float32, "compact" bfloat16 weights multiplied in
    float32, "argmax" the place of the largest product by a screen. "int8 without AMX", which must be asked for, is int8
    by the instructions that processors without AMX have. --processor-time counts the CPU time of all threads.

    Raises:
        ValueError: unknown form.
    """
    if unknown := set(forms) - {*FORMS, WITHOUT_AMX}:
        raise ValueError(f"forms={sorted(unknown)} are none of {', '.join((*FORMS, WITHOUT_AMX))}")
    clock = time.process_time if processor_time else time.perf_counter
    rng, found = np.random.default_rng(0), []
    for (inputs, outputs), number in SHAPES.items():
        made = _forms(rng, inputs, outputs, number * matrices, forms)
        for count in rows:
            x = jnp.asarray(rng.standard_normal((count, inputs)), jnp.float32)
            best = dict.fromkeys(made, float("inf"))
            for _ in range(TURNS):
                for name, (run, held) in made.items():
                    best[name] = min(best[name], _seconds(run, x, held, clock))
            row: dict[str, Any] = {"matrix": f"{inputs} x {outputs}", "rows": count}
            for name, seconds in best.items():
                row[name] = 2e-9 * count * inputs * outputs / seconds
                if name != "float32":
                    row[f"{name}, times"] = best["float32"] / seconds
            found.append(row)
    return found


def _forms(
    rng: np.random.Generator, inputs: int, outputs: int, number: int, wanted: Sequence[str]
) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Return for float32 and each form that is wanted the loop over its matrices, and these."""

    def held(matrix: Any) -> Any:
        return jax.tree.map(jnp.asarray, matrix)

    def integers() -> Any:
        codes = rng.integers(-127, 128, (inputs, outputs)).astype(np.int8)
        return tiled(QuantisedMatrix(codes, np.ones((1, outputs), np.float32)))

    def halves_of_bytes() -> Any:
        codes = rng.integers(0, 256, (inputs // 2, outputs)).astype(np.uint8)
        return tiled(QuantisedMatrix(codes, ones, ones, codec=UINT4_PAIRS))

    def normal() -> np.ndarray:
        return rng.standard_normal((inputs, outputs), np.float32)

    def screened() -> Any:
        table = jnp.asarray(normal().T)
        return table, make_screen(table)

    def stored() -> np.ndarray:
        return rng.standard_normal((inputs, outputs)).astype(ml_dtypes.bfloat16)

    ones = np.ones((inputs // GROUP, outputs), np.float16)
    pairs = _over_all(bfloat16_matmul)
    makers: dict[str, tuple[Any, Callable[[], Any]]] = {
        "panels": (_over_all(partial(multiply, impl="cpu")), lambda: panelled_floats(normal())),
        "table": (_over_all(_by_tables), lambda: np.ascontiguousarray(normal().T)),
        "argmax": (_over_all(_by_screens), screened),
        "compact": (pairs, lambda: tiled_floats(stored(), -2, product="float32")),
        "bfloat16": (pairs, lambda: tiled_floats(stored(), -2)),
        "int8": (_over_all(tiled_matmul), integers),
        WITHOUT_AMX: (_over_all(partial(tiled_matmul, kind=kind_in_registers(best_kind()))), integers),
        "int4": (_over_all(tiled_matmul), halves_of_bytes),
    }
    plain = [jnp.asarray(normal()) for _ in range(number)]
    forms: dict[str, tuple[Any, list[Any]]] = {"float32": (_over_all(partial(matmul, impl="cpu")), plain)}
    for name in wanted:
        run, make = makers[name]
        forms[name] = run, [held(make()) for _ in range(number)]
    return forms


def _by_tables(x: Any, tables: list[Any], number: Any) -> Any:
    """Return the product with one of some tables."""
    return jax.lax.switch(number, [lambda x, table=table: matmul_table(x, table, impl="cpu") for table in tables], x)


def _by_screens(x: Any, tables: list[Any], number: Any) -> Any:
    """Return the places of the largest products with one of some tables, as floats."""

    def places(x: Any, table: Any, screen: Any) -> Any:
        return screened_argmax(x, table, screen, impl="cpu").astype(jnp.float32)[:, None]

    return jax.lax.switch(number, [lambda x, both=both: places(x, *both) for both in tables], x)


def _over_all(product: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, matrices: list[Any]) -> Any:
        def turn(total: Any, number: Any) -> Any:
            return total + product(x, matrices, number)[:, :8].sum(), None

        return jax.lax.scan(turn, jnp.float32(0), jnp.arange(len(matrices)))[0]

    return jax.jit(run)


def _seconds(run: Callable[..., Any], x: Any, matrices: list[Any], clock: Callable[[], float]) -> float:
    """Return the seconds of a product, after a run that warms up."""
    run(x, matrices).block_until_ready()
    start = clock()
    run(x, matrices).block_until_ready()
    return (clock() - start) / len(matrices)
