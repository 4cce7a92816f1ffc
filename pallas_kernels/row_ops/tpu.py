"""Implements row_ops as a Pallas Mosaic TPU kernel: a norm, or an addition and its norm, in one launch.

XLA makes three operations of them (the sum with the total of its squares, the roots, and copying the norm's weights to
the next product), each of which costs a TPU about 1,800 cycles besides its work. This kernel adds, squares, sums and
scales 16 rows at a time in VMEM.
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


def takes(x: jax.Array, more: jax.Array | None = None) -> bool:
    """Tell whether rows are computed here: whole registers of them, in a dtype that a TPU loads."""
    rows, size = x.shape if x.ndim == 2 else (0, 0)
    return (
        (more is None or x.dtype == more.dtype)
        and x.dtype in (jnp.bfloat16, jnp.float32)
        and rows > 0
        and rows % SUBLANES == 0
        and size % LANES == 0
        and size <= MAX_SIZE
    )


def rms_norm(
    x: Float[Array, "rows size"],
    scale: Float[Array, " size"] | StackedRow,
    eps: float,
    offset: float,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "rows size"]:
    """See `pallas_kernels.row_ops.rms_norm`.

    Raises:
        ValueError: rows are not what `takes` says.
    """
    if not takes(x):
        raise ValueError(f"rows of {x.shape} {x.dtype} are no whole registers")
    (normed,) = _call("rms_norm", (x,), scale, eps, offset, interpret)
    return normed


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
    total, normed = _call("add_rms_norm", (x, more), scale, eps, offset, interpret)
    return total, normed


def _call(
    name: str,
    given: tuple[Float[Array, "rows size"], ...],
    scale: Float[Array, " size"] | StackedRow,
    eps: float,
    offset: float,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Float[Array, "rows size"], ...]:
    """Return the norm of rows, or the sum of two arrays of rows, in the first one's memory, and its norm."""
    rows, size = given[0].shape
    slab, tile = math.gcd(rows, SLAB), tile_of(rows, size, given[0].dtype.itemsize)
    blocks = [pl.BlockSpec((tile, size), lambda i, _: (i, 0))] * len(given)
    row = stacked(scale)
    return pl.pallas_call(
        functools.partial(_kernel, slab=slab, eps=eps, offset=offset, adds=len(given) == 2),
        out_shape=(jax.ShapeDtypeStruct((rows, size), given[0].dtype),) * len(given),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows // tile,),
            in_specs=[*blocks, pl.BlockSpec((None, 1, size), lambda i, number: (number[0], 0, 0))],
            out_specs=tuple(blocks),
        ),
        input_output_aliases={1: 0} if len(given) == 2 else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=name,
    )(row.number[None], *given, row.stack)


def tile_of(rows: int, size: int, itemsize: int) -> int:
    """Return how many rows a turn of the grid takes."""
    slab, most = math.gcd(rows, SLAB), TILE_BYTES // (size * itemsize)
    return next(n for n in range(max(most // slab, 1) * slab, 0, -slab) if rows % n == 0)


def _kernel(number, *refs, slab: int, eps: float, offset: float, adds: bool):
    """Norm a tile's rows, `slab` at a time, or two tiles' sum.

    `number`, which chose the scale, is in SMEM [1]; `refs` in VMEM: x [tile, size], with `adds` what is added to it,
    scale [1, size], with `adds` the sum, and the norm.
    """
    x, *more, scale = refs[: 3 if adds else 2]
    normed, total = refs[-1], refs[-2] if adds else x
    rows, size = x.shape
    columns = [pl.ds(start, LANES) for start in range(0, size, LANES)]

    @pl.loop(0, rows // slab)
    def _(turn):
        here = pl.ds(pl.multiple_of(turn * slab, slab), slab)
        squares = jnp.zeros((slab, LANES), jnp.float32)
        for column in columns:
            if adds:
                added = x[here, column].astype(jnp.float32) + more[0][here, column].astype(jnp.float32)
                total[here, column] = added.astype(total.dtype)
            squares += jnp.square(total[here, column].astype(jnp.float32))
        mean = jnp.sum(squares, axis=-1, keepdims=True) * (1 / size)
        root = jnp.broadcast_to(lax.rsqrt(mean + eps), (slab, LANES))
        for column in columns:
            factor = scale[:, column].astype(jnp.float32) + offset
            normed[here, column] = (total[here, column].astype(jnp.float32) * root * factor).astype(normed.dtype)
