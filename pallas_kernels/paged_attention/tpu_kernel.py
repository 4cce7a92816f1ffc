"""Holds the body of the TPU paged-attention kernel: one unit's queries against its keys, for one chunk of heads.

Memory. Nothing but queries, pages and results crosses HBM.

    HBM    view [blocks * layers, KV heads, tiles, block_size, 128]      the pool, in place; only read
           tables, where they do not fit in SMEM                        copied into windows of SMEM (`tpu_ring`)
    SMEM   fields of `Units`, tables or windows, the ring's cursor      the scalar core finds a DMA's source here
    VMEM   queries of a tile [chunks, heads, rows, lanes]               moved by Pallas, double buffered
           ring of pages [depth, step pages, heads, tiles, block_size, 128]     filled by the kernel's own DMAs
           maximum and sum [chunks, heads, rows, 128], weighted values [chunks, heads, rows, value lanes], float32
           penalty [1, keys of a step]: far beyond any query for keys without a block
           out: the unit's tile, or a block of rows with heads side by side
           new rows of a block of the batch, and tiles with them on their way (`tpu_new_rows`)

    Donated: the view, where new rows are written; where a prompts' launch came before, its result is `into` and aliased
    to the decodes' output.

Loops. The grid is (chunks of heads, units, or blocks of eight units of one row). Chunks may run on different cores;
units run in order, so scratch lives from one unit to the next:

    for unit in units:                         # one sequence's part of a tile of rows
        for step in steps of the unit:         # step pages, a few hundred keys
            start the DMAs of step + depth - 1 # of this unit or of one after it
            wait for the DMAs of this step
            for chunk of rows in the tile:     # a decode has one
                for span of the step:          # [rows, span] scores in the matrix units
                    scores, online softmax, values
        write the unit's own rows

Units of one row. A step is rounded up to one of a few sizes, each of which is one basic block with a few chains of
products, maximum, exponentials and result. The compiler packs the scalar instructions that start DMAs, with predicates,
into the same bundles as the arithmetic (see `tpu_softmax`). It keeps starts and loads in the order they are written in,
hence the DMAs are started in shares, one after each span's loads. The sequence alone decides which block it takes.
Where a step's scores are few, such units have a kernel of their own (`tpu_decode`).

Units of prompts. A unit is the prompt's part of a tile of the batch: some chunks of rows. A step is fetched once for
all chunks; then each chunk that holds queries of the unit is multiplied with the spans it sees. So a prompt that fills
little of a tile costs little arithmetic. Rows of other sequences in a chunk are computed but not written.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.counting_loop import loop
from pallas_kernels.kv_codes import has_scales, tokens_of
from pallas_kernels.layout import KVTiles
from pallas_kernels.paged_attention.reference import Reach
from pallas_kernels.paged_attention.tpu_refs import named
from pallas_kernels.paged_attention.tpu_ring import Ring
from pallas_kernels.paged_attention.tpu_softmax import OnlineSoftmax, load_tile, of_halves
from pallas_kernels.paged_attention.tpu_turns import (
    begin_block,
    prime,
    seen_by_row,
    steps_of,
    visit_units,
    write_row,
    zero_dead_row,
)
from pallas_kernels.paged_attention.tpu_units import write_side_by_side
from pallas_kernels.paged_attention.tpu_unseen import MissingBlocks

CHAINS = 4
"""Most parts of a decode's step with a maximum each, see `OnlineSoftmax.add`."""


def attend_to_units(*refs, at_once: int, count: int, **options) -> None:
    """Attend from the units of a turn of the grid, `at_once` of `count` at most; see `attend_to_unit`."""
    head_chunk, first = pl.program_id(0), pl.program_id(1) * at_once  # a loop's body has no number of a turn
    visit_units(lambda unit: attend_to_unit(head_chunk, unit, *refs, **options), first, at_once, count)


def attend_to_unit(
    head_chunk: Any,
    unit: Any,
    *refs,
    chunk: int,
    scale: float,
    soft_cap: float | None,
    reach: Reach,
    span_pages: int,
    held: KVTiles,
    compute_dtype: jnp.dtype,
    layers: int,
    has_sinks: bool,
    has_last_keys: bool,
    side_by_side: bool,
    zero_dead_units: bool,
    one_row: bool,
    new_rows: int,
    jitted: bool,
):
    """Attend from one unit's queries to its keys, for one chunk of heads.

    `refs`: see `tpu_refs`. The queries of the unit's tile are [chunks, heads, rows, lanes] with row = group member *
    chunk + place, and out is [chunks, heads, rows, value lanes]. `chunk`: rows of the batch in a chunk. `span_pages`:
    pages whose keys are multiplied at once. `zero_dead_units`: units that are not live have rows of `out`. `one_row`:
    units are of one row, and queries and `out` are blocks of rows instead of chunks. `side_by_side`: out is [rows of
    the batch, heads * group * value lanes], and begins with zeros, or, where units are of one row, with the block of
    the prompts' result. `layers`, `has_sinks`, `has_last_keys`, `new_rows`: see `named`.
    `jitted`: see `Ring`.
    """
    given = named(
        refs,
        head_chunk,
        layers=layers,
        has_sinks=has_sinks,
        has_last_keys=has_last_keys,
        has_into=side_by_side and one_row,
        new_rows=new_rows,
        num_own=0,
    )
    units, ids, q, out, last_keys, into, new = (
        given.units, given.ids, given.q, given.out, given.last_keys, given.into, given.new
    )  # fmt: skip
    buffers, penalty, rows = given.buffers, given.penalty, q.shape[2]
    step_pages, block_size = buffers.shape[1], tokens_of(buffers)
    span, spans = span_pages * block_size, step_pages // span_pages
    step_keys = step_pages * block_size
    # Queries of units of one row come, and results go, in blocks of rows: fewer DMAs to wait for.
    mine_of_block = lax.rem(units.tile[jnp.minimum(unit, jnp.maximum(units.num_units[0] - 1, 0))], q.shape[0])
    where = given.cursor, given.layer, given.rows, given.first_head
    ring = Ring(units, ids, given.view, buffers, given.sems, *where, jitted)
    missing = MissingBlocks(ids, buffers, penalty)

    def softmax(c):
        """Return the state of a chunk's queries."""
        return OnlineSoftmax(
            q.at[mine_of_block if one_row else c],
            given.top.at[c],
            given.total.at[c],
            given.acc.at[c],
            scale,
            soft_cap,
            compute_dtype,
            *given.sinks,
        )

    def each_chunk(do):
        """Call ``do(c)`` for the chunks that hold queries of a prompt's unit."""
        stop = lax.div(units.stop[unit] + (chunk - 1), chunk)
        loop(lax.div(units.first[unit], chunk), stop)(do)

    def queries(c):
        """Return the positions of the first and last query of a prompt's unit in a chunk."""
        start = c * chunk
        first, stop = jnp.maximum(units.first[unit], start), jnp.minimum(units.stop[unit], start + chunk)
        return units.query_pos[unit] + first, units.query_pos[unit] + stop - 1

    def places(c):
        """Return the place in the tile of each row of a chunk, [rows, 1]."""
        return c * chunk + (lax.broadcasted_iota(jnp.int32, (rows, 1), 0) & (chunk - 1))

    def load(at, i, tiles_of):
        """Load some tiles of a buffer's span i."""
        return [load_tile(buffers, at, i * span_pages, span_pages, t, compute_dtype) for t in tiles_of]

    def attend_plain(c, at):
        """Attend to a step all of whose keys all queries see."""
        softmax(c).add(lambda i: load(at, i, held.keys), lambda i: load(at, i, held.values), spans)

    def last_of_rows(c):
        """Return the last key that each row sees, [rows, 1]: lane ``place`` of the chunk's."""
        lane = lax.broadcasted_iota(jnp.int32, (rows, last_keys[0].shape[2]), 1)
        own = lax.broadcasted_iota(jnp.int32, lane.shape, 0) & (chunk - 1)
        return jnp.sum(jnp.where(lane == own, last_keys[0][c], 0), axis=1, keepdims=True)

    def attend_span(c, at, i, start):
        """Attend to span i, masked; its first key is at position `start`."""

        def values(_):  # zero unseen values: memory that was never written may hold NaN
            return [
                v.only(units.key_start[unit] - start, units.key_stop[unit] - start) for v in load(at, i, held.values)
            ]

        key = start + lax.broadcasted_iota(jnp.int32, (rows, span), 1)
        key += penalty[:, pl.ds(pl.multiple_of(i * span, span), span)]
        query = units.query_pos[unit] + places(c)
        seen = (key <= (last_of_rows(c) if last_keys else query)) & (key < units.key_stop[unit])
        if reach.limited:
            seen &= key >= reach.first_key(query)
        softmax(c).add(lambda _: load(at, i, held.keys), values, 1, seen)

    def attend_rounded(at, start, size, surely, masked):
        """Attend from one row to the keys that it sees of a step's first `size` spans, and start the copies of another
        step. It sees all keys of the first `surely` spans, but for those before its window or chunk; where nothing is
        `masked`, it sees all."""
        fetched = ring.next_step()

        def keys(i):
            k = load(at, i, held.keys)
            ring.fetch_share(fetched, i, 2 * size)
            return k

        def values(i):
            v = load(at, i, held.values)
            ring.fetch_share(fetched, size + i, 2 * size)
            if not masked or (i < surely and not (i == 0 and reach.limited)):
                return v
            first = start + i * span  # zero unseen values: memory that was never written may hold NaN
            return [tile.only(units.key_start[unit] - first, units.key_stop[unit] - first) for tile in v]

        seen = None
        if masked:
            seen = seen_by_row(units, unit, reach, start, penalty, (rows, size * span))
        softmax(0).add(keys, values, size, seen, min(size, CHAINS))
        write(0)  # after each step, though the last would do: in this block most of it fills bundles that were empty

    def attend_masked(c, at, start, pages):
        """Attend to the spans of a step of `pages` pages that a chunk's queries see."""
        # Spans outside of what any query of the chunk sees are skipped, not masked: a prompt's causal triangle costs
        # half of its square.
        lowest, highest = queries(c)
        last = units.key_stop[unit] - 1 if last_keys else highest
        begin: Any = 0
        if reach.limited:
            begin = lax.div(jnp.maximum(reach.first_key(lowest) - start, 0), span)
        stop = lax.div(jnp.maximum(last - start + span, 0), span)
        stop = jnp.minimum(stop, lax.div(pages + (span_pages - 1), span_pages))

        @loop(begin, stop)
        def _(i):
            attend_span(c, at, i, start + i * span)

    def attend_one_row(at, step, start, broken):
        """Attend from a sequence that decodes to a step, and start the copies of another."""
        pages = jnp.minimum(units.num_pages[unit] - step * step_pages, step_pages)
        plain = (start >= units.key_start[unit]) & (start + step_keys <= jnp.where(broken, 0, units.key_stop[unit]))
        ring.wait(at, pages)
        hide(at, step, pages, broken)
        if new is not None:
            new.merge_into_step(units, ids, unit, buffers, at, step, start)
        # A branch has no loop and no other branch. Only such a block lets the compiler pack the scalar work of the DMAs
        # into the bundles of the arithmetic. Which branch is taken, the sequence alone decides, hence also its bits.
        pl.when(plain)(lambda: attend_rounded(at, start, spans, spans, masked=False))
        for below, size in _sizes(spans):
            fits = ~plain & (pages > below * span_pages) & (pages <= size * span_pages)
            pl.when(fits)(functools.partial(attend_rounded, at, start, size, max(below, 0), masked=True))
        pl.when(broken)(missing.forget)

    def attend_chunks(at, step, start, broken):
        """Attend from the chunks of a prompt to a step, and start the copies of another."""

        def run(pages):
            @each_chunk
            def _(c):
                lowest, highest = queries(c)
                plain = (start >= reach.first_key(highest)) & (start + step_keys <= jnp.where(broken, 0, lowest + 1))
                lax.cond(
                    plain,
                    lambda: attend_plain(c, at),
                    lambda: attend_masked(c, at, start, pages),
                )

        with_step(at, step, broken, run)

    def with_step(at, step, broken, run):
        """Start the copies of another step, wait for this one, hide what it lacks and call ``run(pages)``."""
        pages = jnp.minimum(units.num_pages[unit] - step * step_pages, step_pages)
        # Fetch before waiting: the buffer that was computed last is free, and the DMAs then overlap the arithmetic.
        ring.fetch(ring.free())
        ring.wait(at, pages)

        hide(at, step, pages, broken)
        run(pages)
        pl.when(broken)(missing.forget)

    def hide(at, step, pages, broken):
        """Hide the missing blocks of a step, if the sequence has some."""
        pl.when(broken)(lambda: missing.hide(at, unit, units.entry[unit] + step * step_pages, pages))

    def write(c):
        """Write the rows of a chunk that are the unit's own."""
        result = softmax(c).result()
        if side_by_side and has_scales(buffers.dtype):
            result = of_halves(result)
        if one_row:
            write_row(out, units.tile[unit], result, side_by_side)
        elif side_by_side:
            place = lax.broadcasted_iota(jnp.int32, (chunk, 1), 0)
            own = (place >= units.first[unit] - c * chunk) & (place < units.stop[unit] - c * chunk)
            write_side_by_side(out, pl.ds(pl.multiple_of(c * chunk, chunk), chunk), result, own, chunk)
        else:  # rows of other units in the chunk were computed too: keep the tile's results for them
            mine = (places(c) >= units.first[unit]) & (places(c) < units.stop[unit])
            out[c] = jnp.where(mine, result, out[c].astype(jnp.float32)).astype(out.dtype)

    if side_by_side:
        begin_block(units, unit, into, out)

    pl.when(unit == 0)(lambda: prime(ring, missing, new))

    @pl.when(unit < units.num_units[0])
    def _run():
        each_chunk(lambda c: softmax(c).reset())
        broken = units.broken[unit] != 0

        @loop(0, steps_of(units, unit, step_pages))
        def _(step):
            start = units.first_key[unit] + step * step_keys
            (attend_one_row if one_row else attend_chunks)(ring.taken(), step, start, broken)
            ring.release()

        if not one_row:
            each_chunk(write)
        if new is not None:
            pl.when(unit == units.num_units[0] - 1)(new.drain)

    if zero_dead_units:
        zero_dead_row(units, unit, out)


def _sizes(spans: int) -> list[tuple[int, int]]:
    """Return the numbers of spans that a part of a step is rounded up to, each with the number below it.

    The smallest one takes no span too.
    """
    sizes = {spans, (3 * spans + 3) // 4}  # of the longest, each span less counts most
    while spans > 1:
        spans = (spans + 1) // 2
        sizes.add(spans)
    return list(itertools.pairwise([-1, *sorted(sizes)]))
