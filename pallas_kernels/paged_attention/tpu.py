"""paged_attention as a Pallas Mosaic TPU kernel: ragged, flash-style, reading the pool in place.

The grid runs over units (see `tpu_units`) and chunks of KV heads. A unit walks its pages in steps of a few
hundred keys with the online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1), the queries of one
KV head as rows of one matrix product. A step's blocks are copied by one DMA each from wherever the block table
says into their place in a ring buffer; the ring runs `RING - 1` steps ahead, across units, so a sequence of one
step does not wait for its memory either.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import LANES, padded_head_dim
from pallas_kernels.paged_attention.tpu_units import check_tables, cut_into_units, max_units, unit_of_token

RING = 4
UNROLL = 8
"""Pages whose DMAs are started by straight-line code."""
MAX_ROWS = 128
"""Query rows of one matrix product."""
MAX_STEP_KEYS = 512
STEP_BYTES = 2**20
"""Most VMEM one step's blocks take; the ring holds `RING` of them."""
MAX_HEADS = 8
"""KV heads a grid step takes at once."""

MASKED = -1e30
"""A finite stand-in for -inf: differences of two of them stay numbers."""
NEVER = 2**30
"""Added to the position of a key that no query may see."""


def _kernel(
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
    window: int | None,
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
        return lax.div(num_pages(u) + step_pages - 1, step_pages)

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
        query = query_pos[unit] + (lax.broadcasted_iota(jnp.int32, (rows, step_keys), 0) & (tile - 1))
        seen = key <= query
        if window is not None:
            seen &= key > query - window
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


def paged_attention(
    q: Float[Array, "tokens kv_heads q_per_kv head_dim"],
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    block_tables: Int[Array, "seqs pages"],
    query_starts: Int[Array, " seqs+1"],
    kv_lens: Int[Array, " seqs"],
    *,
    scale: float,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    max_query_len: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "tokens kv_heads q_per_kv head_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`.

    Raises:
        ValueError: when the view's block size is not a multiple of its dtype's sublane tile.
    """
    tokens, kv_heads, group, head_dim = q.shape
    blocks, _, _, tiles, block_size, _ = view.shape
    seqs, pages = block_tables.shape
    sublanes = 32 // view.dtype.itemsize
    if block_size % sublanes:
        raise ValueError(f"block_size={block_size} is not a multiple of {sublanes}, the tile of {view.dtype}")

    longest = min(tokens, max_query_len or tokens)
    tile = 1  # a power of two, so that a row's query is its low bits
    while 2 * tile * group <= MAX_ROWS and tile < longest:
        tile *= 2
    rows = tile * group
    heads = max(n for n in range(1, min(kv_heads, MAX_HEADS) + 1) if kv_heads % n == 0)
    key_bytes = heads * tiles * LANES * view.dtype.itemsize
    step_keys = max(LANES, min(MAX_STEP_KEYS, STEP_BYTES // key_bytes) // LANES * LANES)
    step_pages = max(1, min(step_keys, -(-pages * block_size // LANES) * LANES) // block_size)
    step_keys = step_pages * block_size
    lanes = max(LANES, padded_head_dim(head_dim))
    both_bf16 = q.dtype == view.dtype == jnp.bfloat16

    units = max_units(tokens, seqs, tile, max_query_len)
    plan, first_row = cut_into_units(query_starts, kv_lens, tile=tile, units=units, sliding_window=sliding_window)
    tables, broken = check_tables(block_tables, query_starts, kv_lens, blocks, block_size, sliding_window)

    picked = jnp.minimum(first_row[:, None] + jnp.arange(tile), tokens - 1)
    queries = jnp.pad(q[picked], ((0, 0),) * 4 + ((0, lanes - head_dim),))
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(units, kv_heads, rows, lanes)

    def block_of_unit(h, u, _, num_units, *__):
        # Units past the last live one name its block again, which moves no memory.
        return jnp.minimum(u, jnp.maximum(num_units[0] - 1, 0)), h, 0, 0

    unit_spec = pl.BlockSpec((1, heads, rows, lanes), block_of_unit)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            pages=pages,
            tile=tile,
            scale=scale,
            soft_cap=soft_cap,
            window=sliding_window,
            compute_dtype=jnp.dtype(jnp.bfloat16 if both_bf16 else jnp.float32),
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8,
            grid=(kv_heads // heads, units),
            in_specs=[unit_spec, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=unit_spec,
            scratch_shapes=[
                pltpu.VMEM((RING, heads, tiles, step_keys, LANES), view.dtype),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, lanes), jnp.float32),
                pltpu.VMEM((1, step_keys), jnp.int32),
                pltpu.SMEM((3,), jnp.int32),
                pltpu.SemaphoreType.DMA((RING,)),
            ],
        ),
        interpret=interpret,
        name="paged_attention",
    )(jnp.asarray(layer, jnp.int32)[None], *plan, broken, tables.reshape(-1), queries, view)

    start_of_v = lanes - padded_head_dim(head_dim)  # a packed row's product carries K's lanes too
    out = out.reshape(units, kv_heads, group, tile, lanes)[..., start_of_v : start_of_v + head_dim]
    unit, place = unit_of_token(query_starts, tokens, tile)
    live = jnp.arange(tokens) < query_starts[-1]
    return jnp.where(live[:, None, None, None], out[jnp.minimum(unit, units - 1), :, :, place], 0)
