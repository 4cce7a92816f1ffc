"""Finds the fastest tiles of a GPU's attention kernels, and puts them into the table of `gpu_shapes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pallas_kernels.gpu_launch import has_matrix_units
from pallas_kernels.layout import padded_head_dim
from pallas_kernels.paged_attention import gpu_shapes
from pallas_kernels.paged_attention.gpu_shapes import Kernel, Tiles
from scripts.benchmarks.gpu_check import kernels
from scripts.benchmarks.gpu_check.kernels import Sizes

ITEMSIZE = 2
SHAPES = (
    Sizes(),
    Sizes(kv_heads=1, group=8),
    Sizes(group=2),
    Sizes(group=8, head_dim=64),
    Sizes(group=2, head_dim=256),
)
"""Attention of Llama-3.1-8B, of a Llama-3.3-70B on eight devices, of Qwen3-0.6B, GPT-OSS-20B and Gemma-2-9B."""

Timer = Callable[[Sizes, Kernel, Tiles], float]


def rules_of(sizes: Sizes, kernel: Kernel) -> Tiles:
    """Return the tiles that the rules have for what is measured, on the GPU that is compiled for."""
    width, units = padded_head_dim(sizes.head_dim), has_matrix_units()
    if kernel == "decode":
        return gpu_shapes.decode_tiles(sizes.group, width, ITEMSIZE, matrix_units=units)
    return gpu_shapes.prefill_tiles(sizes.group, width, ITEMSIZE, sizes.prompts * sizes.context, matrix_units=units)


def seconds_with(sizes: Sizes, kernel: Kernel, tiles: Tiles) -> float:
    """Measure the kernel with some tiles, in seconds a call."""
    with gpu_shapes.with_tiles(tiles):
        measure = kernels.decode_seconds if kernel == "decode" else kernels.prefill_seconds
        return measure(sizes, "gpu")


def tune(
    chip: str,
    *,
    shapes: tuple[Sizes, ...] = SHAPES,
    file: Path = gpu_shapes.FILE,
    timer: Timer = seconds_with,
    more_time: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[str, Tiles, Tiles]]:
    """Yield for each shape and kernel what the table calls it, the rules' tiles and the fastest, which are then in the
    table.

    Args:
        chip: what JAX calls the GPU.
        more_time: False ends the search; a shape that was not searched to its end is left out.
    """
    for sizes in shapes:
        for kernel in ("decode", "prefill"):
            rules = rules_of(sizes, kernel)
            key = gpu_shapes.key_of(kernel, sizes.group, padded_head_dim(sizes.head_dim), ITEMSIZE, rules.rows)
            if key in gpu_shapes.read(file).get(chip, {}):
                continue
            if not more_time():
                return
            best = gpu_shapes.fastest(rules, partial(timer, sizes, kernel), more_time=more_time)
            if not more_time():
                return
            gpu_shapes.add(file, chip, {key: best})
            yield key, rules, best
