"""Implements the inner loop of both Triton attention kernels: an online softmax over the keys of a sequence's blocks.

This is FlashAttention-2 (arXiv 2307.08691, algorithm 1), with each key's row found through the block table.

Memory. A token has 2 * WIDTH lanes per layer and head, K's and then V's. A block of the view stores them as tiles of
128 lanes, each with BLOCK_ROWS rows. Queries and the three accumulators stay in the caller's registers. Each turn of
the loop brings K and V of KEYS tokens, [KEYS, WIDTH] each, and makes scores of [rows, KEYS] in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pallas_kernels.gpu_codes import read_rows

LOG2E = tl.constexpr(1.4426950408889634)


@triton.constexpr_function
def product_dtype(q, view):
    """Return the element type of the products: the queries' type if the view holds the same type or single bytes, else
    float32."""
    own = q.dtype.element_ty
    return own if view.dtype.element_ty in (own, tl.int8, tl.uint8) else tl.float32


@triton.jit
def values_of_view(view, FLOAT8: tl.constexpr):
    """Return the view's pointer; with FLOAT8, typed so that the GPU itself converts the bytes from float8."""
    if FLOAT8:
        view = view.to(tl.pointer_type(tl.float8e4nv))
    return view


@triton.jit
def first_key(query, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the position of the first key that a query at a position sees; see `reference.Reach`."""
    first = query * 0
    if WINDOW is not None:
        first = tl.maximum(first, query - WINDOW + 1)
    if CHUNK is not None:
        first = tl.maximum(first, query - query % CHUNK)
    return first


@triton.jit
def attend(
    top,
    total,
    values,
    q,
    head_rows,
    table,
    start,
    stop,
    lowest,
    query,
    last,
    BLOCKS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    PER_QUERY: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the softmax statistics of some queries after the keys at positions ``start <= k < stop``, from `lowest`
    on.

    Args:
        top, total, values: maximum (base 2), sum and weighted values so far: [rows], [rows], [rows, WIDTH] float32.
        q: [rows, WIDTH] in the dtype of the products.
        head_rows: pointer to block 0's rows of this layer and head.
        table: pointer to the sequence's block table.
        start: a multiple of KEYS.
        query: [rows] positions; only read if PER_QUERY, else every row sees every key of the range.
        last: [rows] positions of the last keys that the queries see, at or after their own; only read if PER_QUERY.
    """
    key = start + tl.arange(0, KEYS)
    block = tl.load(table + key // BLOCK_SIZE, mask=(key >= lowest) & (key < stop), other=-1)
    for _ in range(start, stop, KEYS):
        known = (block >= 0) & (block < BLOCKS)
        home = head_rows + tl.where(known, block, 0).to(tl.int64) * BLOCK_STRIDE
        # A key's row is 128 lanes long in each tile; scales of one-byte views follow the block's rows, 4 bytes a key.
        row = home + key % BLOCK_SIZE * 128
        scales = home + BLOCK_SIZE * 128 + key % BLOCK_SIZE * 4
        # Read one turn ahead: the next rows' addresses are then known in time to start their copies.
        ahead = key + KEYS
        next_block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < stop, other=-1)
        # Keys without a block read zeros: a weight of zero would not hide the NaN that unused memory may hold.
        k = read_rows(row, scales, known, q.dtype, 0, BLOCK_ROWS, WIDTH)
        # [rows, KEYS]. tf32x3 affects float32 only: three passes of the matrix units, nearly as exact as float32.
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        # LOG2E is folded into the scale, so that the softmax needs powers of two only.
        if SOFT_CAP is not None:
            # tanh from one exponential. It may overflow to infinity, which gives 1.
            tanh = 1 - 2 / (tl.exp2(scores * (2 * LOG2E * SCALE / SOFT_CAP)) + 1)
            scores = tanh * (SOFT_CAP * LOG2E)
        else:
            scores = scores * (SCALE * LOG2E)
        seen = known[None, :]
        if PER_QUERY:
            seen = seen & (key[None, :] <= last[:, None])
            if WINDOW is not None or CHUNK is not None:
                seen = seen & (key[None, :] >= first_key(query, WINDOW, CHUNK)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that saw no key yet has top -inf, and -inf - -inf would be NaN.
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - finite[:, None])
        # Older sums are relative to the old maximum; `keep` makes them relative to the new one.
        keep = tl.exp2(top - finite)
        v = read_rows(row, scales, known, q.dtype, WIDTH, BLOCK_ROWS, WIDTH)
        total = total * keep + tl.sum(weights, 1)
        values = tl.dot(weights.to(q.dtype), v, values * keep[:, None], input_precision="tf32x3")
        top = new_top
        key += KEYS
        block = next_block
    return top, total, values
