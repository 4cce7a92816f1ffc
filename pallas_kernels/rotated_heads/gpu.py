"""Implements rotated_heads as one Triton kernel: a program has the rows of one token and one KV head.

Memory. Everything lies in global memory and is read once, but for a row's partners: lane i is turned with lane
``i + half``, which another thread may hold, so a program loads its rows a second time in that order, from the
first-level cache. It holds two tiles, [ROWS, LANES], in registers: the group's queries, its key and its value are their
rows.

Loops. There are none: the grid is (tokens, KV heads). Nothing is donated, and programs wait for nothing.
"""

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float

from pallas_kernels.gpu_launch import Launch, Launcher, triton_call
from pallas_kernels.rotated_heads.reference import HeadNorms


@triton.jit
def rotate_heads(
    joined,
    cos,
    sin,
    factors,
    q,
    k,
    v,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    NORMED: tl.constexpr,
    EPS: tl.constexpr,
):
    """Program (t, h) writes q [tokens, HEADS, GROUP, HEAD_DIM], k and v [tokens, HEADS, HEAD_DIM] of a token and head.

    They come from joined [tokens, HEADS, GROUP + 2, HEAD_DIM] and the angles' cos and sin, [tokens, HALF] float32. If
    NORMED, queries and keys are normed before: factors [2, HEAD_DIM] float32 are theirs, else nothing is read there.

    ROWS and LANES are powers of two, GROUP + 2 and HEAD_DIM or above.
    """
    token = tl.program_id(0).to(tl.int64)
    place = token * HEADS + tl.program_id(1)
    lane = tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    turns = lane < 2 * HALF
    pair = token * HALF + tl.where(lane < HALF, lane, lane - HALF)
    cosine = tl.load(cos + pair, mask=turns, other=1.0)
    sine = tl.load(sin + pair, mask=turns, other=0.0)
    sine = tl.where(lane < HALF, -sine, sine)
    partner = tl.where(turns, tl.where(lane < HALF, lane + HALF, lane - HALF), lane)
    inside = (lane < HEAD_DIM)[None, :]
    there = joined + place * ((GROUP + 2) * HEAD_DIM) + row[:, None] * HEAD_DIM
    given = tl.load(there + lane[None, :], mask=(row < GROUP + 2)[:, None] & inside, other=0.0)
    other = tl.load(there + partner[None, :], mask=(row < GROUP + 1)[:, None] & inside, other=0.0)
    dtype: tl.constexpr = q.dtype.element_ty
    heads, partners = given.to(tl.float32), other.to(tl.float32)
    if NORMED:
        root = tl.rsqrt(tl.sum(heads * heads, axis=1) / HEAD_DIM + EPS)[:, None]
        mine = factors + tl.where(row < GROUP, 0, HEAD_DIM)[:, None]
        heads = (heads * root * tl.load(mine + lane[None, :], mask=inside, other=0.0)).to(dtype).to(tl.float32)
        partners = (partners * root * tl.load(mine + partner[None, :], mask=inside, other=0.0)).to(dtype).to(tl.float32)
    turned = heads * cosine[None, :] + partners * sine[None, :]
    queries = q + place * (GROUP * HEAD_DIM) + row[:, None] * HEAD_DIM + lane[None, :]
    tl.store(queries, turned.to(dtype), mask=(row < GROUP)[:, None] & inside)
    # The key and the value are rows of the same tile, after the queries, but go to separate arrays.
    alone = place * HEAD_DIM + lane[None, :] + tl.zeros([ROWS, 1], tl.int64)
    tl.store(k + alone, turned.to(dtype), mask=(row == GROUP)[:, None] & inside)
    tl.store(v + alone, given, mask=(row == GROUP + 1)[:, None] & inside)


def rotated_heads(
    joined: Float[Array, "tokens kv_heads rows head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    norms: HeadNorms | None = None,
    *,
    launch: Launcher = triton_call,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rotated_heads.rotated_heads`."""
    tokens, kv_heads, rows, head_dim = joined.shape
    one = jax.ShapeDtypeStruct((tokens, kv_heads, head_dim), joined.dtype)
    rotation = Launch(
        rotate_heads,
        grid=(tokens, kv_heads),
        out=(jax.ShapeDtypeStruct((tokens, kv_heads, rows - 2, head_dim), joined.dtype), one, one),
        constants={
            "HEADS": kv_heads,
            "GROUP": rows - 2,
            "HEAD_DIM": head_dim,
            "HALF": cos.shape[1],
            "ROWS": 1 << (rows - 1).bit_length(),
            "LANES": 1 << (head_dim - 1).bit_length(),
            "NORMED": norms is not None,
            "EPS": 0.0 if norms is None else norms.eps,
        },
        num_warps=4,
    )
    q, k, v = launch(rotation, joined, cos, sin, cos if norms is None else norms.factors)
    return q, k, v
