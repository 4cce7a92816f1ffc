"""The body of the TPU paged-attention kernel: one unit's queries against its keys, for one chunk of heads.

The online softmax is FlashAttention-2's (arXiv 2307.08691, algorithm 1). A step's blocks are copied by one DMA
each from wherever the block table says into their place in a ring buffer; the ring runs `RING - 1` steps ahead,
across units, so a sequence of one step does not wait for its memory either.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.reach import Reach

RING = 4
UNROLL = 8
"""Pages whose DMAs are started by straight-line code."""

MASKED = -1e30
"""A finite stand-in for -inf: differences of two of them stay numbers."""
NEVER = 2**30
"""Added to the position of a key that no query may see."""


def attend_to_unit(
    layer,
    num_units,
    seq,
    query_pos,
    key_start,
    key_stop,
    broken,
    tables,
    q_ref,
    view,
    out_ref,
    ring,
    top,
    total,
    acc,
    penalty,
    cursor,
    sems,
    *,
    pages: int,
    tile: int,
    scale: float,
    soft_cap: float | None,
    reach: Reach,
    compute_dtype: jnp.dtype,
):
    """One unit's queries against its keys, for one chunk of heads.

    SMEM: the fields of `Units`; broken [seqs]: some needed page has no block; tables [seqs * pages], -1 for no
    block; cursor [3]: next step to fetch (unit, step in it) and the number of steps consumed.
    HBM: view. VMEM: q_ref, out_ref [1, heads, rows, lanes], row = group member * tile + query;
    ring [RING, heads, tiles, step keys, 128]; softmax state top, total [heads, rows, 128] (all lanes equal) and
    acc [heads, rows, lanes]; penalty [1, step keys].
    """
    _, heads, tiles, step_keys, _ = ring.shape
    block_size = view.shape[4]
    step_pages = step_keys // block_size
    rows = q_ref.shape[2]
    first_head = pl.program_id(0) * heads
    unit = pl.program_id(1)
    value_tile = tiles // 2  # of a packed row, tile 0 is both K and V

    def first_page(u):
        return lax.div(key_start[u], block_size)

    def num_pages(u):
        return lax.div(key_stop[u] + block_size - 1, block_size) - first_page(u)

    def num_steps(u):
        return jnp.maximum(lax.div(num_pages(u) + step_pages - 1, step_pages), 1)

    def each_page(u, step, action):
        """action(p, block) for the pages of one step, `UNROLL` of them at a time."""
        entry = seq[u] * pages + first_page(u) + step * step_pages
        live = jnp.minimum(num_pages(u) - step * step_pages, step_pages)
        even = lax.div(live, UNROLL) * UNROLL

        @pl.loop(0, even, step=UNROLL)
        def _(start):
            for i in range(UNROLL):
                action(start + i, tables[entry + start + i])

        @pl.loop(even, live)
        def _(p):
            action(p, tables[entry + p])

    def page_dma(at, p, block):
        place = pl.ds(pl.multiple_of(p * block_size, block_size), block_size)
        source = view.at[jnp.maximum(block, 0), layer[0], pl.ds(first_head, heads)]
        return pltpu.make_async_copy(source, ring.at[at, :, :, place, :], sems.at[at])

    def fetch_next(at):
        """Start the DMAs of the step the cursor is at, if there is one, and move the cursor on."""
        u, step = cursor[0], cursor[1]

        @pl.when(u < num_units[0])
        def _():
            each_page(u, step, lambda p, block: page_dma(at, p, block).start())
            last = step + 1 >= num_steps(u)
            cursor[0] = jnp.where(last, u + 1, u)
            cursor[1] = jnp.where(last, 0, step + 1)

    def hide_foreign_rows(at, step, base):
        """Zero the keys and values that are not this unit's: memory no one wrote may hold NaN."""
        key = base + lax.broadcasted_iota(jnp.int32, (step_keys, LANES), 0)
        mine = (key >= key_start[unit]) & (key < key_stop[unit])
        for head in range(heads):
            for t in range(tiles):
                ring[at, head, t] = jnp.where(mine, ring[at, head, t], 0).astype(ring.dtype)

        @pl.when(broken[seq[unit]] != 0)
        def _():
            column = lax.broadcasted_iota(jnp.int32, (1, step_keys), 1)

            def mark(p, block):
                @pl.when(block < 0)
                def _():
                    here = (column >= p * block_size) & (column < (p + 1) * block_size)
                    penalty[...] = jnp.where(here, NEVER, penalty[...])
                    lost = pl.ds(pl.multiple_of(p * block_size, block_size), block_size)
                    ring[at, :, :, lost, :] = jnp.zeros((heads, tiles, block_size, LANES), ring.dtype)

            each_page(unit, step, mark)

    def product(a, b, contract):
        """[heads, ., .] batched matrix product in float32."""
        precision = lax.Precision.HIGHEST if compute_dtype == jnp.float32 else None
        return lax.dot_general(
            a.astype(compute_dtype),
            b.astype(compute_dtype),
            (contract, ((0,), (0,))),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def attend(at, base):
        scores = jnp.zeros((heads, rows, step_keys), jnp.float32)
        for t in range(max(1, value_tile)):
            scores += product(q_ref[0, :, :, t * LANES : (t + 1) * LANES], ring[at, :, t], ((2,), (2,)))
        scores *= scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        key = base + lax.broadcasted_iota(jnp.int32, (rows, step_keys), 1) + penalty[...]
        query = query_pos[unit] + (lax.broadcasted_iota(jnp.int32, (rows, 1), 0) & (tile - 1))
        seen = key <= query
        if reach.limited:
            seen &= key >= reach.first_key(query)
        scores = jnp.where(seen[None], scores, MASKED)

        # A row that has seen nothing yet keeps top == MASKED and adds ones here; its first real score wipes them.
        old_top = top[:, :, :1]
        new_top = jnp.maximum(old_top, jnp.max(scores, axis=2, keepdims=True))
        weights = jnp.exp(scores - new_top)
        fade = jnp.exp(old_top - new_top)
        new_total = fade * total[:, :, :1] + jnp.sum(weights, axis=2, keepdims=True)
        top[...] = jnp.broadcast_to(new_top, top.shape)
        total[...] = jnp.broadcast_to(new_total, total.shape)
        for t in range(value_tile, tiles):
            lanes = slice((t - value_tile) * LANES, (t - value_tile + 1) * LANES)
            acc[:, :, lanes] = fade * acc[:, :, lanes] + product(weights, ring[at, :, t], ((2,), (1,)))

    @pl.when(unit == 0)
    def _prime():
        for i in range(3):
            cursor[i] = 0
        penalty[...] = jnp.zeros_like(penalty)
        pl.loop(0, RING - 1)(fetch_next)

    @pl.when(unit < num_units[0])
    def _run():
        top[...] = jnp.full_like(top, MASKED)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

        @pl.loop(0, num_steps(unit))
        def _(step):
            at = lax.rem(cursor[2], RING)
            fetch_next(lax.rem(cursor[2] + RING - 1, RING))  # the place consumed last
            each_page(unit, step, lambda p, block: page_dma(at, p, block).wait())
            base = (first_page(unit) + step * step_pages) * block_size
            foreign = (base < key_start[unit]) | (base + step_keys > key_stop[unit])

            @pl.when(foreign | (broken[seq[unit]] != 0))
            def _():
                hide_foreign_rows(at, step, base)

            attend(at, base)

            @pl.when(broken[seq[unit]] != 0)
            def _():
                penalty[...] = jnp.zeros_like(penalty)

            cursor[2] += 1

        saw_any = top[:, :, :1] > MASKED / 2
        weight = jnp.where(saw_any, 1 / total[:, :, :1], 0)
        out_ref[0] = (acc[...] * weight).astype(out_ref.dtype)
