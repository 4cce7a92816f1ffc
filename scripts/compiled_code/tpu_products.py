"""Says how long products with a layer's matrix take on a TPU: what the compiler expects of some, fitted for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.layer_ops import product_cycles
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import arrays_of

STACK = 40 * 4096 * 4096
"""Numbers of a compiled product's stack of matrices: more bytes than VMEM has, into which it would else be moved
beforehand."""
SHAPES = ((4096, 768), (512, 4096), (4096, 3072), (1536, 4096), (8192, 7168), (2048, 768), (4096, 18992))
"""Inputs and outputs of matrices that are compiled: those of Qwen3-8B on eight devices, and others."""
ROWS = (64, 1024)


class Expected(NamedTuple):
    """Holds what a chip's compiler expects of products: seconds that each takes, and the share of a peak besides.

    Attributes:
        few: of few rows, which wait for the matrix; the peak is HBM's.
        many: of many rows; the peak is that of the matrix units.
    """

    few: tuple[float, float]
    many: tuple[float, float]


EXPECTED = {"v6e": Expected((2.7e-6, 0.82), (3.8e-6, 0.84)), "tpu7x": Expected((3.0e-6, 0.62), (5.5e-6, 0.79))}
"""Fitted to `tpu-products`; launches are among them."""


def product_seconds(target: str, rows: int, inputs: int, outputs: int) -> float:
    """Return the seconds of a product with a matrix in HBM, as the compiler would expect them."""
    chip, (few, many) = CHIPS[target], EXPECTED[target]
    of_bytes = few[0] + 2 * inputs * outputs / (few[1] * chip.hbm)
    return max(of_bytes, many[0] + 2 * rows * inputs * outputs / (many[1] * chip.flops))


def products(
    targets: list[str] = list(EXPECTED),  # noqa: B006 (never changed)
    rows: list[int] = list(ROWS),  # noqa: B006
) -> Iterator[Row]:
    """Compile products in bfloat16 with one layer's matrix of a stack, and return what the compiler expects: a minute.

    A row has the compiler's estimate in microseconds, what `whole-steps` counts instead, their ratio, and the shares of
    HBM's and the matrix units' peaks that the estimate comes to.
    """
    need_compiler("tpu")
    with schedule_dumps():
        for target, chip in chosen("targets", targets, CHIPS).items():
            for number in rows:
                for inputs, outputs in SHAPES:
                    us = product_cycles(_text(target, number, inputs, outputs)) / chip.clock * 1e6
                    counted = product_seconds(target, number, inputs, outputs) * 1e6
                    yield {
                        "target": target,
                        "rows": number,
                        "inputs": inputs,
                        "outputs": outputs,
                        "expected us": us,
                        "counted us": counted,
                        "ratio": counted / us,
                        "of HBM's peak": 2 * inputs * outputs / chip.hbm / us * 1e6,
                        "of the units' peak": 2 * number * inputs * outputs / chip.flops / us * 1e6,
                    }


def _text(target: str, rows: int, inputs: int, outputs: int) -> str:
    import jax
    import jax.numpy as jnp

    def run(x, stack, layer):
        return x @ jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)

    array, _ = arrays_of(CHIPS[target])
    stack = array((max(2, -(-STACK // (inputs * outputs))), inputs, outputs), jnp.bfloat16)
    arguments = (array((rows, inputs), jnp.bfloat16), stack, array(()))
    with jax.set_mesh(stack.sharding.mesh):
        return jax.jit(run).lower(*arguments).compile().as_text()
