"""Implements paged_attention as a Pallas Mosaic TPU kernel: ragged, flash-style, reading the pool in place.

A batch with prompts takes two launches, one for the prompts and then one for the sequences that decode (see
`tpu_plan`), which writes its rows into the result of the first. The grid of a launch runs over units (see `tpu_units`)
and chunks of KV heads. A unit walks its pages in steps of keys, the queries of one KV head as rows of matrix products
(see `tpu_kernel` and `tpu_decode`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import TPU_TILE, encode, has_scales, stored, tokens_of
from pallas_kernels.layout import LANES, KVTiles
from pallas_kernels.paged_attention.reference import AttentionCall, Reach
from pallas_kernels.paged_attention.tpu_decode import BUFFERS_IN_USE, FIELDS, WAITING, attend_to_rows
from pallas_kernels.paged_attention.tpu_kernel import attend_to_units
from pallas_kernels.paged_attention.tpu_new_rows import IN_FLIGHT
from pallas_kernels.paged_attention.tpu_plan import MIB, Plan, Tuning, copies_of, make_plan
from pallas_kernels.paged_attention.tpu_ring import CURSOR, deepest_ring, windows_for
from pallas_kernels.paged_attention.tpu_softmax import LOG2E, MASKED, in_halves, of_halves
from pallas_kernels.paged_attention.tpu_units import BLOCK_ROWS, ONE_ROW, Tile, Units, in_chunks, in_rows

MAX_SPAN_KEYS = 256
"""Keys that are multiplied at once."""
SUBLANES = 8
"""Rows of a register: fewer query rows of a head take as many."""
ROWS_OF_BLOCK = 8
"""Fewest rows of the batch whose queries come in one DMA, and whose results go in one, where units are of one row."""
HEADS_OF_BLOCK = 128
"""Most heads of such rows together: where a block ends, the kernel takes two turns without keys."""
MAX_HEADS = 8
"""KV heads a grid step takes at once."""
MAX_DEPTH = 32
"""Steps that VMEM holds at once, where they are small."""
SPARE_VMEM = 12 * MIB
"""VMEM for the compiler's temporaries of the products, in addition to buffers and scratch."""


def paged_attention(
    call: AttentionCall,
    plan: Plan | None = None,
    *,
    new: Float[Array, "tokens kv_heads tiles 128"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Any:
    """See `pallas_kernels.paged_attention.paged_attention`.

    Args:
        plan: the batch's plan from `make_plan`, if the step has made it already; None = make it here.
        new: rows of the tokens, which the view does not have yet; ``max_query_len`` is 1 and no two sequences have a
            block in common that is written. The view with them is a second result, and is aliased to the view.

    Raises:
        ValueError: see `make_plan`; or the plan was made without the `last_keys` that are given.
    """
    q, view, value_dim = call.q, call.view, call.value_dim
    tokens, _, group, head_dim = q.shape
    if plan is None:
        plan = make_plan(
            call.block_tables,
            call.query_starts,
            call.kv_lens,
            view,
            tokens=tokens,
            q_per_kv=group,
            reach=call.reach,
            max_query_len=call.max_query_len,
            last_keys=call.last_keys,
        )
    elif call.last_keys is not None and plan.last_keys is None and call.max_query_len != 1:
        raise ValueError("last_keys are given, but the plan was made without: give them to plan_attention too")
    blocks, layers, _, tiles, _, _ = view.shape
    in_bf16 = q.dtype == jnp.bfloat16 and view.dtype != jnp.float32
    held = KVTiles.of(tiles, value_dim)  # a packed row is multiplied whole, as key and as value
    lanes = len(held.keys) * LANES
    queries = q if lanes == head_dim else jnp.pad(q, ((0, 0),) * 3 + ((0, lanes - head_dim),))
    shared = _Shared(
        jnp.asarray(call.layer, jnp.int32)[None],
        view.reshape(blocks * layers, *view.shape[2:]),
        plan,
        None if call.sinks is None else jnp.maximum(call.sinks.astype(jnp.float32) * LOG2E, MASKED),
        held,
        interpret,
        {
            "scale": call.scale,
            "soft_cap": call.soft_cap,
            "reach": call.reach,
            "held": held,
            "compute_dtype": jnp.dtype(jnp.bfloat16 if in_bf16 else jnp.float32),
            "layers": layers,
        },
        call.block_tables.shape[1],
        [] if new is None else _new_rows(new, view.dtype),
    )
    start_of_v = LANES - held.lanes  # a packed row's product carries K's lanes too
    width = slice(start_of_v, start_of_v + (value_dim or head_dim))
    decode = functools.partial(_launch, shared, queries, plan.decodes, ONE_ROW, None, "paged_attention_decode")
    if plan.prompts is None and new is None:
        return decode()[..., width]
    if plan.prompts is None:
        out, written = decode()
        return out[..., width], written.reshape(view.shape)
    if new is not None:
        raise ValueError("new rows are taken with max_query_len=1 only: write them by kv_write first")
    read = _launch(shared, queries, plan.prompts, plan.tile, plan.last_keys, "paged_attention_prompts")
    if plan.side_by_side:
        out = decode(read)[:tokens]
        return out.reshape(*queries.shape[:3], -1)[..., width]
    assert plan.of_prompt is not None and plan.of_decode is not None
    of_prompt, of_decode = plan.of_prompt[:, None, None, None], plan.of_decode[:, None, None, None]
    return jnp.where(of_decode, decode(), jnp.where(of_prompt, read, 0))[..., width]


class _Shared(NamedTuple):
    """Holds the inputs that both launches of a call share.

    Attributes:
        view: HBM [blocks * layers, kv_heads, tiles, block_rows, 128].
        sinks: float32 [kv_heads, q_per_kv], in units of log 2; None = none.
        held: the lanes of a row that hold keys and values.
        options: further arguments of `attend_to_unit` and of `attend_to_rows`.
        pages: width of the block tables.
        new_rows: what `NewRows` merges: nothing, rows, or rows and words.
    """

    layer: Int[Array, " 1"]
    view: Array
    plan: Plan
    sinks: Array | None
    held: KVTiles
    interpret: bool | pltpu.InterpretParams
    options: dict[str, Any]
    pages: int
    new_rows: list[Array]


def _new_rows(rows: Float[Array, "tokens kv_heads tiles 128"], dtype: Any) -> list[Array]:
    """Return rows as a view of `dtype` stores them, [kv_heads, tiles, tokens in whole memory tiles, 128]; and their
    scales, if they have some, as a word in all lanes of a row."""
    found = [stored(rows, dtype)]
    if has_scales(dtype):
        codes, scales = encode(rows)
        words = jax.lax.bitcast_convert_type(scales, jnp.int32)
        found = [codes, jnp.broadcast_to(words[..., None], codes.shape)]
    found = [jnp.moveaxis(part, 0, 2) for part in found]
    tail = -len(rows) % (32 // jnp.dtype(dtype).itemsize)
    return [jnp.pad(part, ((0, 0), (0, 0), (0, tail), (0, 0))) for part in found] if tail else found


def _launch(
    shared: _Shared,
    q: Float[Array, "tokens kv_heads q_per_kv lanes"],
    work: Int[Array, "fields units"],
    tile: Tile,
    last_keys: Int[Array, "chunks 1 lanes"] | None,
    name: str,
    into: Float[Array, "tile_rows columns"] | None = None,
) -> Any:
    """Attend from the units of one work list.

    Returns:
        [tokens, kv_heads, q_per_kv, value_lanes]; rows of no unit may be anything. Where the plan is `side_by_side`,
        [rows of whole tiles, kv_heads * q_per_kv * value_lanes]; rows of no unit are those of `into`, whose memory is
        reused where it is not read again, or zeros. With new rows also the view.
    """
    view, plan = shared.view, shared.plan
    tokens, kv_heads, group, lanes = q.shape
    units, (_, _, tiles, block_rows, _) = work.shape[1], view.shape
    block_size, copies = tokens_of(view), copies_of(view.dtype)
    rows = group * tile.chunk * copies
    heads = max(n for n in range(1, min(kv_heads, MAX_HEADS) + 1) if kv_heads % n == 0)
    row_bytes = heads * tiles * LANES * view.dtype.itemsize
    one_row = tile == ONE_ROW
    tuning = plan.tuning.for_decodes(heads * max(rows, SUBLANES), block_size) if one_row else plan.tuning
    # Whether decodes are a pipeline does not depend on the batch, as their bits do on it.
    seen = _pages_seen(shared.options["reach"], block_size)
    whole_step = pages_of_step(row_bytes, block_size, seen, tuning)[1] * block_size
    pipelined = one_row and heads * max(rows, SUBLANES) * whole_step <= tuning.pipelined_scores
    pipelined &= view.dtype.itemsize > 1  # codes were not simulated
    whole_tables = plan.tables.ndim == 1
    pipelined &= whole_tables or deepest_ring(shared.pages) > BUFFERS_IN_USE
    pages = min(shared.pages, seen) if pipelined else shared.pages
    span_pages, step_pages = pages_of_step(row_bytes, block_size, pages, tuning)
    depth = _ring_depth(
        step_pages * block_size * row_bytes,
        tuning,
        None if whole_tables else shared.pages,
        6 if pipelined else 4 if one_row else 2,
    )
    value_lanes = len(shared.held.values) * LANES
    zero_dead_units = plan.prompts is None
    batch_rows = ROWS_OF_BLOCK
    while pipelined and 2 * batch_rows * heads <= HEADS_OF_BLOCK and batch_rows < tokens:
        batch_rows *= 2
    block_chunks = batch_rows if one_row else tile.chunks
    # Where unit u is row u, a turn of the grid takes a block of rows: a turn for each takes forty cycles more.
    at_once = min(batch_rows, units) if one_row and zero_dead_units else 1

    queries = in_chunks(q, tile)
    queries = in_halves(queries) if copies == 2 else queries

    def tile_of_unit(h, u, _, work, *__):
        # Units past the last live one name its tile again, which moves no memory.
        listed = Units.of(work)
        row = listed.tile[jnp.minimum(u * at_once, jnp.maximum(listed.num_units[0] - 1, 0))]
        return row, h

    def block_of_tile(h, u, _, work, *__):
        row, _ = tile_of_unit(h, u, _, work)
        return lax.div(row, batch_rows) if one_row else row, h, 0, 0

    def block_of_unit(h, u, _, work, *__):
        listed = Units.of(work)
        if into is None:  # units past the last live one name the tiles without a live unit, to zero them
            return listed.tile[u], h
        return lax.div(tile_of_unit(h, u, _, work)[0], BLOCK_ROWS), h

    def own_row(h, u, *_):  # the rows of units that are not live become zero
        return lax.div(u * at_once, batch_rows), h, 0, 0

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    in_specs, inputs = ([], []) if whole_tables else ([in_hbm], [plan.tables])
    in_specs += [pl.BlockSpec((block_chunks, heads, rows, lanes), block_of_tile), in_hbm]
    inputs += [queries, view]
    if shared.sinks is not None:
        of_rows = jnp.tile(jnp.repeat(shared.sinks, tile.chunk, axis=1), (1, copies))
        in_specs.append(pl.BlockSpec((heads, rows, LANES), lambda h, *_: (h, 0, 0)))
        inputs.append(jnp.broadcast_to(of_rows[..., None], (kv_heads, rows, LANES)))
    if last_keys is not None:
        of_tile = (tile.chunks, *last_keys.shape[1:])
        in_specs.append(pl.BlockSpec(of_tile, lambda h, u, *more: (tile_of_unit(h, u, *more)[0], 0, 0)))
        inputs.append(last_keys)
    if plan.side_by_side:
        columns, tile_rows = group * value_lanes, plan.tile.tokens
        out_shape: tuple[int, ...] = (-(-tokens // tile_rows) * tile_rows, kv_heads * columns)
        block: tuple[int, ...] = (tile_rows if into is None else BLOCK_ROWS, heads * columns)
        out_spec = pl.BlockSpec(block, block_of_unit)
    else:
        out_shape = (*queries.shape[:3], value_lanes)
        block = (block_chunks, heads, rows, value_lanes)
        out_spec = pl.BlockSpec(block, own_row if zero_dead_units else block_of_tile)
    if into is not None:
        in_specs.append(out_spec)
        inputs.append(into)
    new_rows = shared.new_rows
    align = 32 // view.dtype.itemsize
    new_block = -(-at_once // align) * align  # whole memory tiles

    def rows_of_unit(h, u, *more):
        return h, 0, lax.div(tile_of_unit(h, u, *more)[0], new_block), 0

    in_specs += [pl.BlockSpec((heads, tiles, new_block, LANES), rows_of_unit)] * len(new_rows)
    inputs += new_rows
    if pipelined:
        body = attend_to_rows
    else:
        of_chunks = {"chunk": tile.chunk, "has_last_keys": last_keys is not None, "one_row": one_row}
        body = functools.partial(attend_to_units, **of_chunks)
    prefetched = [shared.layer, work, *([plan.tables] if whole_tables else [])]
    # In order: the ring of KV; each chunk's maxima, sums and weighted values; the penalty of keys without a block; the
    # ring's cursor; and a semaphore for each buffer of the ring.
    scratch = [
        pltpu.VMEM((depth, step_pages, heads, tiles, block_rows, LANES), view.dtype),
        pltpu.VMEM((tile.chunks, heads, rows, LANES), jnp.float32),
        pltpu.VMEM((tile.chunks, heads, rows, LANES), jnp.float32),
        pltpu.VMEM((tile.chunks, heads, rows, value_lanes), jnp.float32),
        pltpu.VMEM((1, step_pages * block_size), jnp.int32),
        pltpu.SMEM((CURSOR,), jnp.int32),
        pltpu.SemaphoreType.DMA((depth,)),
    ]
    sent_bytes = 0
    if pipelined:
        kept = heads, rows, step_pages * block_size
        scratch += [*[pltpu.VMEM(kept, jnp.float32)] * 2, pltpu.VMEM((heads, rows, LANES), jnp.float32)]
        scratch += [pltpu.SMEM((len(WAITING), len(FIELDS)), jnp.int32)]
        sent_bytes += 8 * heads * max(rows, SUBLANES) * step_pages * block_size
    if new_rows:
        places = IN_FLIGHT, heads, tiles
        scratch += [pltpu.VMEM((*places, align, LANES), view.dtype), pltpu.SemaphoreType.DMA((IN_FLIGHT,))]
        scratch += [pltpu.SMEM((1,), jnp.int32)]
        scratch += [pltpu.VMEM((*places, TPU_TILE, LANES), view.dtype)] * has_scales(view.dtype)
        sent_bytes += 2 * math.prod(places) * align * LANES * view.dtype.itemsize
        sent_bytes += 2 * new_block * heads * tiles * LANES * sum(part.dtype.itemsize for part in new_rows)
    if not whole_tables:
        windows = windows_for(depth)
        scratch += [pltpu.SMEM((windows, *plan.tables.shape[1:]), jnp.int32), pltpu.SemaphoreType.DMA((windows,))]
    ring_bytes = depth * step_pages * block_rows * row_bytes
    state_bytes = 4 * tile.chunks * heads * rows * (2 * LANES + value_lanes)
    moved = block_chunks * heads * rows * lanes + math.prod(block) * (1 if into is None else 2)
    moved_bytes = 2 * q.dtype.itemsize * moved  # double buffers
    result = jax.ShapeDtypeStruct(out_shape, q.dtype)
    aliases = {} if into is None else {len(prefetched) + len(inputs) - 1: 0}
    if new_rows:
        aliases[len(prefetched) + (0 if whole_tables else 1) + 1] = 1
    out = pl.pallas_call(
        functools.partial(
            body,
            at_once=at_once,
            count=units,
            span_pages=span_pages,
            has_sinks=shared.sinks is not None,
            side_by_side=plan.side_by_side,
            zero_dead_units=zero_dead_units,
            new_rows=len(new_rows),
            jitted=shared.interpret is not True,
            **shared.options,
        ),
        out_shape=(result, jax.ShapeDtypeStruct(view.shape, view.dtype)) if new_rows else result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(kv_heads // heads, -(-units // at_once)),
            in_specs=in_specs,
            out_specs=(out_spec, in_hbm) if new_rows else out_spec,
            scratch_shapes=scratch,
        ),
        # Chunks of heads may run on different cores; units must run in order, as the ring goes on from one to the next.
        # Every id is checked before the launch; the compiler's own checks would double the cost of a DMA's start.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            disable_bounds_checks=True,
            vmem_limit_bytes=ring_bytes + state_bytes + moved_bytes + sent_bytes + SPARE_VMEM,
        ),
        input_output_aliases=aliases,
        interpret=shared.interpret,
        name=name,
    )(*prefetched, *inputs)
    if plan.side_by_side:
        return out
    written = []
    if new_rows:
        out, *written = out
    out = of_halves(out) if copies == 2 else out
    out = in_rows(out, tile, group)[:tokens]
    return (out, *written) if written else out


def pages_of_step(key_bytes: int, block_size: int, pages: int, tuning: Tuning) -> tuple[int, int]:
    """Return the pages of a span, whose keys fill whole lanes, and of a step, which is whole spans."""
    aligned = LANES // math.gcd(LANES, block_size)  # pages that fill whole lanes
    keys = min(tuning.step_keys, tuning.step_bytes // key_bytes, pages * block_size)
    span = max(1, min(keys, MAX_SPAN_KEYS) // (aligned * block_size)) * aligned
    return span, max(1, keys // (span * block_size)) * span


def _pages_seen(reach: Reach, block_size: int) -> int:
    """Return the most pages with a key that one query sees, rounded up to whole spans."""
    limits = [limit for limit in (reach.window, reach.chunk) if limit is not None]
    pages = (min(limits) + block_size - 2) // block_size + 1 if limits else 2**20
    aligned = LANES // math.gcd(LANES, block_size)  # as in pages_of_step
    span = max(1, min(-(-pages // aligned), MAX_SPAN_KEYS // (aligned * block_size))) * aligned
    return -(-pages // span) * span


def _ring_depth(step_bytes: int, tuning: Tuning, pages: int | None, least: int) -> int:
    """Return the number of steps that VMEM holds at once: those that are computed, and those in flight.

    Args:
        pages: width of block tables that are copied one by one, see `tpu_ring`; None = all are in scalar memory.
        least: steps that are held however large they are; fewer where the tables of so many do not fit.
    """
    depth = least
    while 2 * depth * step_bytes <= tuning.flight_bytes and 2 * depth <= MAX_DEPTH:
        depth *= 2
    return depth if pages is None else min(depth, deepest_ring(pages))
