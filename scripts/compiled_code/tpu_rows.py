"""Simulates a TPU's kernels that work row by row: the rule of `layer_ops`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.cases import Row
from scripts.compiled_code.compilers import chosen, need_compiler, schedule_dumps
from scripts.compiled_code.layer_ops import LAUNCH, ROW_KERNELS, row_kernel_cycles
from scripts.compiled_code.simulated import Launch, compile_launch, row_of, simulate
from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_kernels import arrays_of

SIZE, GROUP, HEAD_DIM = 4096, 4, 128
EXPERTS, PER_TOKEN = 128, 8


def rows(targets: list[str] = list(CHIPS)) -> Iterator[Row]:  # noqa: B006 (never changed)
    """Simulated time of `add_rms_norm` and `rotated_heads` for a device's share of a Llama-3-8B on eight, and of
    `route` for 8 of 128 experts: a minute.

    The steps have 64 and 512 tokens. A row has the columns of tpu-attention; its bundles; and the cycles that
    `layer_ops.ROW_KERNELS` counts for them, to which it adds those of a launch.
    """
    need_compiler("tpu")
    with schedule_dumps() as dumps:
        for target in chosen("targets", targets, CHIPS):
            for kernel in ROW_KERNELS:
                for tokens in (64, 512):
                    launch = row_launch(target, kernel, tokens)
                    run = simulate(launch, compile_launch(launch, dumps)[0], target)
                    row: Row = {"target": target, "kernel": kernel, "rows": tokens} | row_of(run, "other", target)
                    counted = row_kernel_cycles(kernel, launch.arguments[0].size) - LAUNCH
                    yield row | {"bundles": run.bundles, "counted as": counted}


def row_launch(target: str, kernel: str, tokens: int) -> Launch:
    """Return the launch of a kernel for a step of some tokens."""
    function, operands = _call_of(kernel, tokens)
    array, _ = arrays_of(CHIPS[target])
    return Launch(function, tuple(array(*operand) for operand in operands), kernel, "other", {}, {})


def _call_of(kernel: str, rows: int) -> tuple[Any, list[tuple[tuple[int, ...], Any]]]:
    """Return a kernel's function, and its operands' shapes and dtypes."""
    import jax.numpy as jnp

    from pallas_kernels.expert_mlps import tpu_route
    from pallas_kernels.rotated_heads import HeadNorms
    from pallas_kernels.rotated_heads import tpu as heads
    from pallas_kernels.row_ops import tpu as norm

    if kernel == "route":

        def route(logits):
            given = {"scores": "softmax", "sums_to_one": True, "scale": 1.0, "added_to_sum": 0.0, "least_sum": 0.0}
            return tpu_route.route(logits, None, per_token=PER_TOKEN, dtype=jnp.dtype(jnp.bfloat16), **given).share

        return route, [((rows, EXPERTS), jnp.float32)]
    if kernel == "rms_norm":
        return (
            lambda x, scale: norm.rms_norm(x, scale, 1e-5, 0.0),
            [((rows, SIZE), jnp.bfloat16), ((SIZE,), jnp.bfloat16)],
        )
    if kernel == "add_rms_norm":
        shapes = [((rows, SIZE), jnp.bfloat16), ((rows, SIZE), jnp.bfloat16), ((SIZE,), jnp.bfloat16)]
        return lambda x, more, scale: norm.add_rms_norm(x, more, scale, 1e-5, 0.0), shapes
    joined, half = (rows, 1, GROUP + 2, HEAD_DIM), (rows, HEAD_DIM // 2)
    shapes = [(joined, jnp.bfloat16), (half, jnp.float32), (half, jnp.float32)]
    if kernel == "rotated_heads":
        return heads.rotated_heads, shapes
    scales = [((HEAD_DIM,), jnp.bfloat16)] * 2
    return (
        lambda x, cos, sin, q, k: heads.rotated_heads(x, cos, sin, HeadNorms(q, k, 1e-6)),
        shapes + scales,
    )
