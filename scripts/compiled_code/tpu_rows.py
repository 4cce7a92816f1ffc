"""Counts the cycles of a TPU's kernels that work row by row, in the compiler's schedule: the rule of `layer_ops.py`.

    python scripts/tpu_row_kernels.py                  v5e, v6e, v5p and tpu7x: a minute
    python scripts/tpu_row_kernels.py --targets v5e

Compiles `add_rms_norm` and `rotated_heads`, with norms and without, with the shapes of a device's share of a Llama-3-8B
on eight, for a step of 64 tokens and one of 512. A row has all bundles of the kernel's schedule, a cycle each, as often
as its inner loop turns, which is more than it runs; those for 16 x 128 numbers; and what `layer_ops.ROW_KERNELS` has
for these. Waits and the launch are not in it.

It needs libtpu, as `tpu_schedule.py` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from compiler_env import default_env, run_again_in
from layer_ops import ROW_KERNELS
from llo_bundles import parse
from tpu_launches import CHIPS, Chip, shapes_of
from tpu_schedule import prepare

SIZE, GROUP, HEAD_DIM = 4096, 4, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=CHIPS, default=["v5e", "v6e", "v5p", "tpu7x"])
    parser.add_argument("--env", type=Path, default=default_env("tpu"), help="environment with libtpu")
    options = parser.parse_args()
    if importlib.util.find_spec("libtpu") is None:
        run_again_in(options.env, "tpu")
    print("| target | kernel | rows | cycles | for 16 x 128 numbers | counted as |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as dumps:
        prepare(dumps)
        for target in options.targets:
            for kernel, counted in ROW_KERNELS.items():
                for rows in (64, 512):
                    cycles, numbers = measure(CHIPS[target], kernel, rows, Path(dumps))
                    each = cycles * 16 * 128 / numbers
                    print(f"| {target} | {kernel} | {rows} | {cycles} | {each:.1f} | {counted} |", flush=True)


def measure(chip: Chip, kernel: str, rows: int, dumps: Path) -> tuple[int, int]:
    """Return the cycles of a kernel for a step of so many tokens, and the numbers of what it is given first."""
    import jax

    for old in dumps.iterdir():
        old.unlink()
    function, operands, turn = call_of(kernel, rows)
    array, _, _ = shapes_of(chip, "decode")
    given = [array(*operand) for operand in operands]
    with jax.set_mesh(given[0].sharding.mesh):
        jax.jit(function).lower(*given).compile()
    (final,) = (path for path in dumps.glob(f"*{kernel}*-final_bundles.txt") if "schedule-analysis" not in path.name)
    return len(parse(final.read_text())) * (rows // turn), given[0].size


def call_of(kernel: str, rows: int) -> tuple[Any, list[tuple[tuple[int, ...], Any]], int]:
    """Return a kernel's function, its operands' shapes and dtypes, and how many rows a turn of its inner loop takes."""
    import jax.numpy as jnp

    from pallas_kernels.rotated_heads import HeadNorms
    from pallas_kernels.rotated_heads import tpu as heads
    from pallas_kernels.row_ops import tpu as norm

    if kernel == "rms_norm":
        return (
            lambda x, scale: norm.rms_norm(x, scale, 1e-5, 0.0),
            [((rows, SIZE), jnp.bfloat16), ((SIZE,), jnp.bfloat16)],
            norm.SLAB,
        )
    if kernel == "add_rms_norm":
        shapes = [((rows, SIZE), jnp.bfloat16), ((rows, SIZE), jnp.bfloat16), ((SIZE,), jnp.bfloat16)]
        return lambda x, more, scale: norm.add_rms_norm(x, more, scale, 1e-5, 0.0), shapes, norm.SLAB
    joined, half = (rows, 1, GROUP + 2, HEAD_DIM), (rows, HEAD_DIM // 2)
    shapes = [(joined, jnp.bfloat16), (half, jnp.float32), (half, jnp.float32)]
    if kernel == "rotated_heads":
        return heads.rotated_heads, shapes, heads.TILE
    scales = [((HEAD_DIM,), jnp.bfloat16)] * 2
    return (
        lambda x, cos, sin, q, k: heads.rotated_heads(x, cos, sin, HeadNorms(q, k, 1e-6)),
        shapes + scales,
        heads.TILE,
    )


if __name__ == "__main__":
    main()
