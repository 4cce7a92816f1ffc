"""Is the body of the TPU paged-attention kernel: one unit's queries against its keys, for one chunk of heads.

A unit's pages come in steps (see `tpu_ring`). Nearly all steps of a long context are *plain*: every query sees
every key, and the step to fetch meanwhile is a full one. A plain step is one basic block, so that the compiler packs
the scalar instructions that start DMAs into the same bundles as the arithmetic (see `tpu_softmax`). It keeps starts
and loads in the order they are written in, hence the DMAs are started in shares, one after each span's loads.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.kv_codes import tokens_of
from pallas_kernels.layout import LANES, KVTiles
from pallas_kernels.paged_attention.reach import Reach
from pallas_kernels.paged_attention.tpu_codes import load_tile
from pallas_kernels.paged_attention.tpu_ring import Ring
from pallas_kernels.paged_attention.tpu_softmax import OnlineSoftmax
from pallas_kernels.paged_attention.tpu_units import Units

NEVER = 2**30
"""Added to the position of a key that no query may see."""


def attend_to_unit(
    *refs,
    tile: int,
    scale: float,
    soft_cap: float | None,
    reach: Reach,
    span_pages: int,
    held: KVTiles,
    compute_dtype: jnp.dtype,
    layers: int,
    has_sinks: bool,
    zero_dead_units: bool,
):
    """Attend from one unit's queries to its keys, for one chunk of heads.

    `refs`: in SMEM the layer [1], the fields of `Units` and the tables; in VMEM q [1, heads, rows, lanes] with row =
    group member * tile + query; in HBM the view; in VMEM the sinks [heads, rows, 128] if there are any, the last key
    that each query sees [1, 1, 128] if it may be another than its own, and out [1, heads, rows, value lanes]. Then
    scratch: see `Ring` and `OnlineSoftmax`, and penalty [1, step keys]. `span_pages`: pages whose keys are multiplied
    at once. `layers`: those of the view, whose rows are blocks and layers together. `has_sinks`: whether there are
    sinks. `zero_dead_units`: units that are not live have rows of `out`.
    """
    layer, units = refs[0], Units(*refs[1 : 1 + len(Units._fields)])
    tables, q, view, *given, out, buffers, top, total, acc, penalty, cursor, sems = refs[1 + len(units) :]
    _, heads, rows, _ = q.shape
    step_pages = buffers.shape[1]
    block_size = tokens_of(buffers)
    span, spans = span_pages * block_size, step_pages // span_pages
    unit = pl.program_id(1)
    view = view.at[pl.ds(layer[0], view.shape[0] - (layers - 1))]
    ring = Ring(units, tables, view, buffers, sems, cursor, first_head=pl.program_id(0) * heads)
    sinks, last_keys = given[:has_sinks], given[has_sinks:]
    softmax = OnlineSoftmax(q, top, total, acc, scale, soft_cap, compute_dtype, *sinks)

    def load(at, i, tiles_of):
        """Load some tiles of a buffer's span i."""
        return [load_tile(buffers, at, i * span_pages, span_pages, t, compute_dtype) for t in tiles_of]

    def attend_plain(at):
        """Attend to a step all of whose keys all queries see, while a full step is fetched."""
        ring.wait_full(at)
        free = ring.free()

        def keys(i):
            k = load(at, i, held.keys)
            ring.fetch_share(free, i, 2 * spans)
            return k

        def values(i):
            v = load(at, i, held.values)
            ring.fetch_share(free, spans + i, 2 * spans)
            return v

        softmax.add(keys, values, spans)

    def last_of_rows(last):
        """Return the last key that each row sees, [rows, 1]: lane ``query`` of `last`."""
        lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
        own = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0) & (tile - 1)
        return jnp.sum(jnp.where(lane == own, last[0], 0), axis=1, keepdims=True)

    def attend_span(at, i, start):
        """Attend to span i, masked; its first key is at position `start`."""

        def values(_):  # memory no one wrote may hold NaN
            return [
                v.only(units.key_start[unit] - start, units.key_stop[unit] - start) for v in load(at, i, held.values)
            ]

        key = start + lax.broadcasted_iota(jnp.int32, (rows, span), 1)
        key += penalty[:, pl.ds(pl.multiple_of(i * span, span), span)]
        query = units.query_pos[unit] + (lax.broadcasted_iota(jnp.int32, (rows, 1), 0) & (tile - 1))
        seen = (key <= (last_of_rows(*last_keys) if last_keys else query)) & (key < units.key_stop[unit])
        if reach.limited:
            seen &= key >= reach.first_key(query)
        softmax.add(lambda _: load(at, i, held.keys), values, 1, seen)

    def hide_missing_blocks(at, entry, pages):
        """Zero what stands in for pages without a block and mark their keys."""
        column = lax.broadcasted_iota(jnp.int32, penalty.shape, 1)

        @pl.loop(0, pages)
        def _(page):
            @pl.when(tables[entry + page] < 0)
            def _():
                here = (column >= page * block_size) & (column < (page + 1) * block_size)
                penalty[...] = jnp.where(here, NEVER, penalty[...])
                buffers[at, page] = jnp.zeros(buffers.shape[2:], buffers.dtype)

    def attend_masked(at, step, start, broken):
        """Attend to any step; its first key is at position `start`."""
        pages = jnp.minimum(units.num_pages[unit] - step * step_pages, step_pages)
        ring.fetch(ring.free())
        ring.wait(at, pages)

        @pl.when(broken)
        def _():
            hide_missing_blocks(at, units.entry[unit] + step * step_pages, pages)

        @pl.loop(0, lax.div(pages + (span_pages - 1), span_pages))
        def _(i):
            attend_span(at, i, start + i * span)

        @pl.when(broken)
        def _():
            penalty[...] = jnp.zeros_like(penalty)

    @pl.when(unit == 0)
    def _prime():
        penalty[...] = jnp.zeros_like(penalty)
        ring.prime()

    @pl.when(unit < units.num_units[0])
    def _run():
        softmax.reset()
        broken = units.broken[unit] != 0
        # The first query sees the fewest keys at the end, the last one the fewest at the beginning.
        plain_start = reach.first_key(units.query_pos[unit] + (tile - 1))
        plain_stop = jnp.where(broken, 0, units.query_pos[unit] + 1)

        @pl.loop(0, jnp.maximum(lax.div(units.num_pages[unit] + (step_pages - 1), step_pages), 1))
        def _(step):
            start = units.first_key[unit] + step * step_pages * block_size
            at = ring.taken()
            plain = (start >= plain_start) & (start + step_pages * block_size <= plain_stop) & ring.next_is_full()

            lax.cond(plain, lambda: attend_plain(at), lambda: attend_masked(at, step, start, broken))
            ring.release()

        out[0] = softmax.result().astype(out.dtype)

    if zero_dead_units:

        @pl.when(unit >= units.num_units[0])
        def _():
            out[0] = jnp.zeros(out.shape[1:], out.dtype)
