"""Counts the cycles of a TPU's kernels that work row by row, in the compiler's schedule: the rule of `layer_ops`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, empty, need_compiler, schedule_dumps
from scripts.compiled_code.layer_ops import ROW_KERNELS
from scripts.compiled_code.llo_bundles import cycles_of_grid, parse
from scripts.compiled_code.tpu_kernels import CHIPS, Chip, shapes_of

SIZE, GROUP, HEAD_DIM = 4096, 4, 128
EXPERTS, PER_TOKEN = 128, 8


def rows(targets: list[str] = list(CHIPS)) -> Iterator[Row]:  # noqa: B006 (never changed)
    """Cycles of `add_rms_norm` and `rotated_heads` for a device's share of a Llama-3-8B on eight, and of `route` for
    8 of 128 experts: a minute.

    The steps have 64 and 512 tokens. A row has the bundles of the kernel's schedule, a cycle each and as often as their
    loops turn; the cycles for 16 x 128 numbers; and those that `layer_ops.ROW_KERNELS` counts for them. Waits and the
    launch are not counted.
    """
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target, chip in chosen("targets", targets, CHIPS).items():
            for kernel, counted in ROW_KERNELS.items():
                for tokens in (64, 512):
                    cycles, numbers = _measure(chip, kernel, tokens, dumps)
                    row: Row = {"target": target, "kernel": kernel, "rows": tokens, "cycles": cycles}
                    yield row | {"for 16 x 128 numbers": cycles * 16 * 128 / numbers, "counted as": counted}


def _measure(chip: Chip, kernel: str, rows: int, dumps: Path) -> tuple[int, int]:
    """Return the cycles of a kernel for a step of `rows` tokens, and the size of its first argument."""
    import jax

    empty(dumps)
    function, operands, grid, inner = _call_of(kernel, rows)
    array, _, _ = shapes_of(chip, "decode")
    given = [array(*operand) for operand in operands]
    with jax.set_mesh(given[0].sharding.mesh):
        jax.jit(function).lower(*given).compile()
    (final,) = (path for path in dumps.glob(f"*{kernel}*-final_bundles.txt") if "schedule-analysis" not in path.name)
    return cycles_of_grid(parse(final.read_text()), grid, inner), given[0].size


def _call_of(kernel: str, rows: int) -> tuple[Any, list[tuple[tuple[int, ...], Any]], int, int]:
    """Return a kernel's function, its operands' shapes and dtypes, its grid's turns, and those of a loop within."""
    import jax.numpy as jnp

    from pallas_kernels.expert_mlps import tpu_route
    from pallas_kernels.rotated_heads import HeadNorms
    from pallas_kernels.rotated_heads import tpu as heads
    from pallas_kernels.row_ops import tpu as norm

    if kernel == "route":

        def route(logits):
            given = {"scores": "softmax", "sums_to_one": True, "scale": 1.0, "added_to_sum": 0.0, "least_sum": 0.0}
            return tpu_route.route(logits, None, per_token=PER_TOKEN, dtype=jnp.dtype(jnp.bfloat16), **given).share

        return route, [((rows, EXPERTS), jnp.float32)], max(rows // tpu_route.TILE, 1), 1
    if kernel == "rms_norm":
        return (
            lambda x, scale: norm.rms_norm(x, scale, 1e-5, 0.0),
            [((rows, SIZE), jnp.bfloat16), ((SIZE,), jnp.bfloat16)],
            *_turns_of_norm(rows),
        )
    if kernel == "add_rms_norm":
        shapes = [((rows, SIZE), jnp.bfloat16), ((rows, SIZE), jnp.bfloat16), ((SIZE,), jnp.bfloat16)]
        return lambda x, more, scale: norm.add_rms_norm(x, more, scale, 1e-5, 0.0), shapes, *_turns_of_norm(rows)
    joined, half = (rows, 1, GROUP + 2, HEAD_DIM), (rows, HEAD_DIM // 2)
    shapes = [(joined, jnp.bfloat16), (half, jnp.float32), (half, jnp.float32)]
    if kernel == "rotated_heads":
        return heads.rotated_heads, shapes, rows // heads.TILE, 1
    scales = [((HEAD_DIM,), jnp.bfloat16)] * 2
    return (
        lambda x, cos, sin, q, k: heads.rotated_heads(x, cos, sin, HeadNorms(q, k, 1e-6)),
        shapes + scales,
        rows // heads.TILE,
        1,
    )


def _turns_of_norm(rows: int) -> tuple[int, int]:
    """Return how many tiles rows are, and how many slabs a tile has."""
    from pallas_kernels.row_ops.tpu import SLAB, tile_of

    tile = tile_of(rows, SIZE, 2)
    return rows // tile, tile // SLAB
