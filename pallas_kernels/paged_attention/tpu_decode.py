"""Holds the body of the TPU kernel for sequences that decode: a pipeline of three stages over steps of keys.

A step of a decode is one chain: products with keys, maximum, exponentials, products with values. Each link takes two
hundred cycles until its first result, and one query leaves the units idle meanwhile. So a turn of the loop takes a
stage of three steps, and what a stage makes waits in VMEM for the next turn:

    turn       n              n + 1                n + 2
    step n     scores         maximum, weights     values, result
    step n+1                  scores               maximum, weights
    step n+2                                       scores

Steps follow each other across sequences as the ring fetched them, and a sequence's first step begins with a state of
its own. Where a block of results ends, two turns without keys empty the pipeline.

A turn is one basic block. Most of its time are the products, of all keys of a step or of the first half, so there is a
block for either, of keys and of values. A step decides alone which products it takes, and so do its bits: keys beyond a
sequence are masked. The compiler packs the scalar instructions that start DMAs, with predicates, into the same bundles
as the arithmetic. It keeps starts and loads in the order they are written in, hence the DMAs are started in shares, one
after each span's loads.

Scratch in addition to that of prompts (`tpu_kernel`): scores and weights of a step, [heads, rows, keys], what the
values so far are multiplied by before the next, and the steps that wait. Donated: the view, where new rows are written;
where a prompts' launch came before, its result is `into` and aliased to the decodes' output.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.counting_loop import loop
from pallas_kernels.kv_codes import tokens_of
from pallas_kernels.layout import LANES, KVTiles
from pallas_kernels.paged_attention.reference import Reach
from pallas_kernels.paged_attention.tpu_refs import named
from pallas_kernels.paged_attention.tpu_ring import Ring
from pallas_kernels.paged_attention.tpu_softmax import MASKED, OnlineSoftmax, load_tile, weigh
from pallas_kernels.paged_attention.tpu_turns import (
    begin_block,
    prime,
    seen_by_row,
    steps_of,
    visit_units,
    write_row,
    zero_dead_row,
)
from pallas_kernels.paged_attention.tpu_units import BLOCK_ROWS
from pallas_kernels.paged_attention.tpu_unseen import CleanValues, MissingBlocks

BUFFERS_IN_USE = 3
"""Steps of the ring that a turn may read, that of the scores and the two before it."""
SCORED, WEIGHED = WAITING = range(2)
"""The steps that wait for their next stage: one has its scores, one its weights."""
BUFFER, BEGINS, ROW, STOP = FIELDS = range(4)
"""What is kept of each, in scalar memory: its buffer; 1 if it is its sequence's first, or no step; the row of the batch
that gets the result, -1 for no step; and one past the last key that the query sees, counted from its first key."""


def attend_to_rows(
    *refs,
    at_once: int,
    count: int,
    scale: float,
    soft_cap: float | None,
    reach: Reach,
    span_pages: int,
    held: KVTiles,
    compute_dtype: jnp.dtype,
    layers: int,
    has_sinks: bool,
    side_by_side: bool,
    zero_dead_units: bool,
    new_rows: int,
    jitted: bool,
) -> None:
    """Attend from the units of a turn of the grid, `at_once` of `count` at most, for one chunk of heads.

    `refs`: see `tpu_refs`. Queries come in blocks [rows of the batch, heads, rows, lanes], and out is of the same form
    or, `side_by_side`, [rows of the batch, heads * group * value lanes], which begins as the prompts' result.
    `zero_dead_units`: unit u is row u, and units that are not live have rows of `out`. Scratch of its own: scores and
    weights, float32 [heads, rows, step keys], and fade, float32 [heads, rows, 128]; SMEM [waiting steps, fields].
    `span_pages`: pages whose keys are multiplied at once. `layers`, `has_sinks`, `new_rows`: see `named`.
    `jitted`: see `Ring`.
    """
    head_chunk, first_unit = pl.program_id(0), pl.program_id(1) * at_once  # a loop's body has no number of a turn
    given = named(
        refs,
        head_chunk,
        layers=layers,
        has_sinks=has_sinks,
        has_last_keys=False,
        has_into=side_by_side,
        new_rows=new_rows,
        num_own=4,
    )
    units, ids, q, out, buffers, new = given.units, given.ids, given.q, given.out, given.buffers, given.new
    top, total, acc, penalty, sinks = given.top, given.total, given.acc, given.penalty, given.sinks
    scores, weights, fade, waiting = given.own
    _, heads, rows, _ = q.shape
    step_pages, block_size = buffers.shape[1], tokens_of(buffers)
    step_keys, span, spans = step_pages * block_size, span_pages * block_size, step_pages // span_pages
    half = (spans + 1) // 2
    where = given.cursor, given.layer, given.rows, given.first_head
    ring = Ring(units, ids, given.view, buffers, given.sems, *where, jitted, BUFFERS_IN_USE)
    missing, clean = MissingBlocks(ids, buffers, penalty), CleanValues(buffers, held.values)
    block_rows = BLOCK_ROWS if side_by_side else q.shape[0]

    def attend_to_unit(unit):
        """Take the steps of a live unit, and let all of a block end before the next one begins."""
        row, broken = units.tile[unit], units.broken[unit] != 0
        steps = steps_of(units, unit, step_pages)
        is_last = unit == units.num_units[0] - 1
        after = units.tile[jnp.minimum(unit + 1, len(units.tile) - 1)]
        ends = is_last | (lax.div(row, block_rows) != lax.div(after, block_rows))

        @loop(0, steps + jnp.where(ends, len(WAITING), 0))
        def _(step):
            at, live, start = ring.taken(), step < steps, units.first_key[unit] + step * step_keys
            entry, pages = units.entry[unit] + step * step_pages, units.num_pages[unit] - step * step_pages
            pages = jnp.where(live, jnp.minimum(pages, step_pages), 0)
            first, stop = units.key_start[unit] - start, units.key_stop[unit] - start
            ring.wait_whole(at, pages)

            # A branch costs a dozen cycles, so what few steps need is asked for at once.
            @pl.when(live & (broken | (first > 0) | (stop < step_keys) | (new is not None)))
            def _():
                # An earlier step's values lie in the pages that this one lacks. They may be infinite or NaN.
                clean.clear(at, pages, jnp.where(stop > half * span, step_pages, half * span_pages))
                pl.when(broken)(lambda: missing.hide(at, unit, entry, pages))
                if new is not None:
                    new.merge_into_step(units, ids, unit, buffers, at, step, start)
                clean.keep(at, first, stop)

            take = functools.partial(take_stages, unit, row, at, step, start, live)
            if half == spans:
                take(spans, spans)
            else:  # a step decides alone which products it takes, and so its bits
                many_values = waiting[WEIGHED, STOP] > half * span

                def of_values(of_keys):
                    lax.cond(many_values, lambda: take(of_keys, spans), lambda: take(of_keys, half))

                lax.cond(pages > half * span_pages, lambda: of_values(spans), lambda: of_values(half))
            pl.when(broken)(missing.forget)
            pl.when(live)(ring.release)

        if new is not None:
            pl.when(is_last)(new.drain)

    def take_stages(unit, row, at, step, start, live, of_keys, of_values):
        """Take a stage of each of three steps, and start the copies of another. This is one basic block.

        Keys are multiplied of `of_keys` spans, values of `of_values`: the step has no more that are seen.
        """
        softmax = OnlineSoftmax(
            q.at[lax.rem(row, q.shape[0])], top.at[0], total.at[0], acc.at[0], scale, soft_cap, compute_dtype, *sinks
        )
        was_scored, was_weighed = ([waiting[kept, field] for field in FIELDS] for kept in WAITING)
        # First what a later stage reads and an earlier one of this turn overwrites.
        share, old_top, old_total, weights_before = softmax.share(), top[0], total[0], weights[...]
        old_fade, was_begun = fade[...], _all(was_weighed[BEGINS], old_top.shape)
        values_so_far = [
            jnp.where(was_begun, 0, old_fade * acc[0, :, :, t : t + LANES]) for t in range(0, acc.shape[3], LANES)
        ]
        begins = _all(was_scored[BEGINS], old_top.shape)
        first_top, first_total = softmax.start()
        old_top, old_total = jnp.where(begins, first_top, old_top), jnp.where(begins, first_total, old_total)
        of_spans = [scores[:, :, i * span : (i + 1) * span] for i in range(spans)]
        new_top = functools.reduce(jnp.maximum, [jnp.max(s, axis=2, keepdims=True) for s in of_spans], old_top)
        new_fade = jnp.exp2(old_top - new_top)
        new_total, new_weights = new_fade * old_total, []
        for score in of_spans:
            weights_of_span, added = weigh(score, new_top)
            new_weights.append(weights_of_span)
            new_total += added

        seen = seen_by_row(units, unit, reach, start, penalty, (rows, step_keys))
        new_scores, fetched, share_number, shares = [], ring.next_step(live), itertools.count(), of_keys + of_values
        for i in range(max(of_keys, of_values)):
            part = slice(i * span, (i + 1) * span)
            if i < of_keys:
                keys = [load_tile(buffers, at, i * span_pages, span_pages, t, compute_dtype) for t in held.keys]
                ring.fetch_share(fetched, next(share_number), shares)
                new_scores.append(jnp.where(seen[None, :, part], softmax.scores(keys), MASKED))
            if i < of_values:
                values = [
                    load_tile(buffers, was_weighed[BUFFER], i * span_pages, span_pages, t, compute_dtype)
                    for t in held.values
                ]
                ring.fetch_share(fetched, next(share_number), shares)
                weighted = [softmax.weighted(weights_before[:, :, part], value) for value in values]
                values_so_far = [a + b for a, b in zip(values_so_far, weighted, strict=True)]
        new_scores += [jnp.full((heads, rows, span), MASKED)] * (spans - of_keys)
        for i in range(spans):
            scores[:, :, i * span : (i + 1) * span] = new_scores[i]
            weights[:, :, i * span : (i + 1) * span] = new_weights[i]
        top[0], total[0], fade[...] = new_top, new_total, new_fade
        acc[0] = found = jnp.concatenate(values_so_far, axis=2)
        # Each step writes what its sequence has so far, so what the last one writes remains. Where no step waits, a row
        # is written that a later turn writes again.
        write_row(out, jnp.where(was_weighed[ROW] < 0, row, was_weighed[ROW]), found * share, side_by_side)
        for field in FIELDS:
            waiting[WEIGHED, field] = was_scored[field]
        stop = jnp.where(live, units.key_stop[unit] - start, 0)
        now = at, jnp.where(live, step == 0, True), jnp.where(live, row, -1), stop
        for field, value in zip(FIELDS, now, strict=True):
            waiting[SCORED, field] = value.astype(jnp.int32)

    def visit(unit):
        if side_by_side:
            begin_block(units, unit, given.into, out)

        @pl.when(unit == 0)
        def _prime():
            prime(ring, missing, new)
            for kept in WAITING:
                for field, value in zip(FIELDS, (0, 1, -1, 0), strict=True):
                    waiting[kept, field] = value

        pl.when(unit < units.num_units[0])(lambda: attend_to_unit(unit))
        if zero_dead_units:
            zero_dead_row(units, unit, out)

    visit_units(visit, first_unit, at_once, count)


def _all(flag: Any, shape: tuple[int, ...]) -> Any:
    """Return whether a scalar is not zero, for each place of an array."""
    return jnp.full(shape, flag, jnp.int32) != 0
