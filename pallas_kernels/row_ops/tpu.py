"""Implements row_ops as a Pallas Mosaic TPU kernel: an addition and its norm in one launch, over rows that lie in VMEM.

XLA makes three operations of them (the sum with the total of its squares, the roots, and bringing the norm's weights
beside the next product), each of which costs a TPU about 1,800 cycles beside its work. Here 16 rows at a time are
added, squared, summed and scaled.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.stacked_row import StackedRow, stacked

LANES = 128
SUBLANES = 8
SLAB = 16
"""Rows that are added and scaled at once: whole registers of bfloat16."""
TILE_BYTES = 2**19
"""VMEM that a tile of rows may take; there are eight of them, as four arrays have two buffers each."""
MAX_SIZE = 16384
"""Numbers of a row, so that a tile has a slab of float32."""


def takes(x: jax.Array, more: jax.Array) -> bool:
    """Tell whether rows are computed here: whole registers of them, in a dtype that a TPU loads."""
    rows, size = x.shape if x.ndim == 2 else (0, 0)
    return (
        x.dtype == more.dtype
        and x.dtype in (jnp.bfloat16, jnp.float32)
        and rows > 0
        and rows % SUBLANES == 0
        and size % LANES == 0
        and size <= MAX_SIZE
    )


def add_rms_norm(
    x: Float[Array, "rows size"],
    more: Float[Array, "rows size"],
    scale: Float[Array, " size"] | StackedRow,
    eps: float,
    offset: float,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """See `pallas_kernels.row_ops.add_rms_norm`; `x` is aliased to the sum.

    Raises:
        ValueError: rows are not what `takes` says.
    """
    if not takes(x, more):
        raise ValueError(f"rows of {x.shape} {x.dtype} and {more.dtype} are no whole registers of one dtype")
    rows, size = x.shape
    slab = math.gcd(rows, SLAB)
    most = TILE_BYTES // (size * x.dtype.itemsize)
    tile = next(n for n in range(max(most // slab, 1) * slab, 0, -slab) if rows % n == 0)
    block = pl.BlockSpec((tile, size), lambda i, _: (i, 0))
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    row = stacked(scale)
    total, normed = pl.pallas_call(
        functools.partial(_kernel, slab=slab, eps=eps, offset=offset),
        out_shape=(like, like),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows // tile,),
            in_specs=[block, block, pl.BlockSpec((None, 1, size), lambda i, number: (number[0], 0, 0))],
            out_specs=(block, block),
        ),
        input_output_aliases={1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="add_rms_norm",
    )(row.number[None], x, more, row.stack)
    return total, normed


def _kernel(number, x, more, scale, total, normed, *, slab: int, eps: float, offset: float):
    """Add and norm a tile's rows, `slab` at a time.

    References are VMEM [tile, size]; but `scale` is [1, size], and `number`, which chose it, SMEM [1].
    """
    rows, size = x.shape
    columns = [pl.ds(start, LANES) for start in range(0, size, LANES)]

    @pl.loop(0, rows // slab)
    def _(turn):
        here = pl.ds(pl.multiple_of(turn * slab, slab), slab)
        squares = jnp.zeros((slab, LANES), jnp.float32)
        for column in columns:
            added = x[here, column].astype(jnp.float32) + more[here, column].astype(jnp.float32)
            total[here, column] = added.astype(total.dtype)
            squares += jnp.square(total[here, column].astype(jnp.float32))
        mean = jnp.sum(squares, axis=-1, keepdims=True) * (1 / size)
        root = jnp.broadcast_to(lax.rsqrt(mean + eps), (slab, LANES))
        for column in columns:
            factor = scale[:, column].astype(jnp.float32) + offset
            normed[here, column] = (total[here, column].astype(jnp.float32) * root * factor).astype(normed.dtype)
