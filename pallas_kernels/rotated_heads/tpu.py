"""Implements rotated_heads as a Pallas Mosaic TPU kernel, whose results lie as `kv_write` and attention read them.

XLA makes five operations of it, most of which move rows from one layout to another. Here tokens are the rows of a
register while heads are turned, by rolling their lanes by half a head; queries are then put token by token, and keys
and values head by head.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.rotated_heads.reference import HeadNorms
from pallas_kernels.stacked_row import stacked

LANES = 128
SUBLANES = 8
TILE = 64
"""Most tokens of a turn of the grid, for one KV head."""


def takes(shape: tuple[int, ...], half: int) -> bool:
    """Tell whether heads are turned here: whole registers of tokens and of lanes, all of which are turned.

    Args:
        shape: of the joined heads, [tokens, kv_heads, rows, head_dim].
        half: pairs of a head.
    """
    tokens, _, _, head_dim = shape
    return tokens > 0 and tokens % SUBLANES == 0 and head_dim % LANES == 0 and 2 * half == head_dim


def rotated_heads(
    joined: Float[Array, "tokens kv_heads rows head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    norms: HeadNorms | None = None,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rotated_heads.rotated_heads`.

    Raises:
        ValueError: heads are not what `takes` says.
    """
    if not takes(joined.shape, cos.shape[1]):
        raise ValueError(f"heads of {joined.shape} with {cos.shape[1]} pairs each are no whole registers that turn")
    tokens, kv_heads, rows, width = joined.shape
    tile = next(n for n in range(min(tokens, TILE), 0, -SUBLANES) if tokens % n == 0)
    table = pl.BlockSpec((tile, width // 2), lambda i, h, *_: (i, 0))
    operands = [joined.reshape(tokens, -1), cos, sin]
    specs = [pl.BlockSpec((tile, rows * width), lambda i, h, *_: (i, h)), table, table]
    numbers = []
    for at, scale in enumerate([] if norms is None else [norms.q, norms.k]):
        row = stacked(scale)
        numbers.append(row.number[None])
        operands.append(row.stack)
        specs.append(pl.BlockSpec((None, 1, width), lambda i, h, *numbers, at=at: (numbers[at][0], 0, 0)))
    q, kv = pl.pallas_call(
        functools.partial(_kernel, rows=rows, **({} if norms is None else {"eps": norms.eps, "offset": norms.offset})),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, kv_heads, rows - 2, width), joined.dtype),
            jax.ShapeDtypeStruct((kv_heads, 2, tokens, width), joined.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            grid=(tokens // tile, kv_heads),
            in_specs=specs,
            out_specs=(
                pl.BlockSpec((tile, None, rows - 2, width), lambda i, h, *_: (i, h, 0, 0)),
                pl.BlockSpec((None, 2, tile, width), lambda i, h, *_: (h, 0, i, 0)),
            ),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="rotated_heads" if norms is None else "normed_rotated_heads",
    )(*numbers, *operands)
    kv = jnp.moveaxis(kv, 2, 0)
    return q, kv[:, :, 0], kv[:, :, 1]


def _kernel(*refs, rows: int, eps: float | None = None, offset: float = 0.0):
    """Turn a KV head of a tile of tokens; all references but the norms' layer numbers are VMEM.

    The numbers of the norms' layers [1], in SMEM; joined [tile, rows * width]; cos, sin [tile, width / 2]; scales of
    the norms of queries and keys [1, width]; q [tile, rows - 2, width]; kv [2, tile, width]. Without `eps` there are
    no numbers and no scales.
    """
    joined, cos, sin, *scales, q, kv = refs if eps is None else refs[2:]
    factors = [scale[...].astype(jnp.float32) + offset for scale in scales]
    width = q.shape[-1]
    both = jnp.concatenate([cos[...], cos[...]], axis=-1)
    signed = jnp.concatenate([-sin[...], sin[...]], axis=-1)

    def row(number):
        return joined[:, pl.ds(number * width, width)]

    def turned(number):
        x = row(number).astype(jnp.float32)
        if eps is not None:
            root = lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) * (1 / width) + eps)
            x = (x * root * factors[number // (rows - 2)]).astype(q.dtype).astype(jnp.float32)
        return x * both + pltpu.roll(x, width // 2, 1) * signed

    q[...] = jnp.stack([turned(number) for number in range(rows - 2)], axis=1).astype(q.dtype)
    kv[0] = turned(rows - 2).astype(kv.dtype)
    kv[1] = row(rows - 1)
