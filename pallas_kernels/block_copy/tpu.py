"""Implements block_copy as one Pallas Mosaic TPU launch, in place.

When no block is both read and written, each pair is one HBM-to-HBM DMA and `IN_FLIGHT` of them overlap.
When some block is both (a chain or a swap), the order of such copies would matter, so that launch goes
through VMEM instead: for one slice of the blocks at a time, every pair's source is read before any
destination is written.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

IN_FLIGHT = 8
STAGING_BYTES = 8 * 2**20
"""VMEM that the slow path may hold."""

ROW_TILE_BYTES = 32
"""Bytes of a lane in a tile: eight rows of four bytes, or more that are narrower."""


def _kernel(src, dst, overlap, _, blocks, staging, sems):
    """Copy blocks. src, dst [pairs] and overlap [1] lie in SMEM; blocks [blocks, slices, rows, lanes] in HBM,
    aliased."""
    pairs = src.shape[0]
    num_blocks, slices = blocks.shape[:2]

    def in_range(i):
        s, d = src[i], dst[i]
        return (s >= 0) & (s < num_blocks) & (d >= 0) & (d < num_blocks)

    def each_pair(action):
        @pl.loop(0, pairs)
        def _(i):
            @pl.when(in_range(i))
            def _():
                action(i)

    @pl.when(overlap[0] == 0)
    def _straight():
        def copy(i):
            return pltpu.make_async_copy(blocks.at[src[i]], blocks.at[dst[i]], sems.at[i % IN_FLIGHT])

        @pl.loop(0, pairs + IN_FLIGHT)
        def _(i):
            @pl.when((i >= IN_FLIGHT) & in_range(jnp.maximum(i - IN_FLIGHT, 0)))
            def _():
                copy(i - IN_FLIGHT).wait()

            @pl.when((i < pairs) & in_range(jnp.minimum(i, pairs - 1)))
            def _():
                copy(i).start()

    @pl.when(overlap[0] != 0)
    def _staged():
        @pl.loop(0, slices)
        def _(c):
            def read(i):
                return pltpu.make_async_copy(blocks.at[src[i], c], staging.at[i], sems.at[0])

            def write(i):
                return pltpu.make_async_copy(staging.at[i], blocks.at[dst[i], c], sems.at[0])

            each_pair(lambda i: read(i).start())
            each_pair(lambda i: read(i).wait())
            each_pair(lambda i: write(i).start())
            each_pair(lambda i: write(i).wait())


def _rows_of_slice(rows: int, tile: int, most: int) -> int:
    """Return the rows of a slice: all or, where these are more than `most`, the most whole tiles that divide them."""
    pieces = (rows // n for n in range(2, rows // tile + 1) if rows % n == 0 and rows // n % tile == 0)
    return rows if rows <= most else next((piece for piece in pieces if piece <= most), rows)


def block_copy(
    blocks: Shaped[Array, "blocks ..."],
    src: Int[Array, " pairs"],
    dst: Int[Array, " pairs"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Shaped[Array, "blocks ..."]:
    """See `pallas_kernels.block_copy.block_copy`. `blocks` is aliased to the result.

    Raises:
        ValueError: when a block has fewer than two axes, or `pairs` slices of one do not fit in VMEM and cannot be cut.
    """
    if blocks.ndim < 3:
        raise ValueError(f"blocks of shape {blocks.shape}: the TPU kernel copies blocks of two axes or more")
    (pairs,) = src.shape
    if pairs == 0:
        return blocks
    lanes, row_bytes = blocks.shape[-1], pairs * blocks.shape[-1] * blocks.dtype.itemsize
    rows = _rows_of_slice(blocks.shape[-2], ROW_TILE_BYTES // blocks.dtype.itemsize, STAGING_BYTES // row_bytes)
    if rows * row_bytes > STAGING_BYTES:
        raise ValueError(
            f"src has {pairs} pairs, which need {rows * row_bytes} bytes of VMEM, more than {STAGING_BYTES}"
        )
    sliced = blocks.reshape(blocks.shape[0], math.prod(blocks.shape[1:-1]) // rows, rows, lanes)
    n = blocks.shape[0]
    live = (src >= 0) & (src < n) & (dst >= 0) & (dst < n)
    overlap = jnp.any((src[:, None] == dst[None, :]) & live[:, None] & live[None, :])
    out = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(sliced.shape, sliced.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((pairs, rows, lanes), blocks.dtype),
                pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
            ],
        ),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),  # ids are checked here
        interpret=interpret,
        name="block_copy",
    )(src.astype(jnp.int32), dst.astype(jnp.int32), overlap.astype(jnp.int32)[None], sliced)
    return out.reshape(blocks.shape)
