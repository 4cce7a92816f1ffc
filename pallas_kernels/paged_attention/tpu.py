"""Implements paged_attention as a Pallas Mosaic TPU kernel: ragged, flash-style, reading the pool in place.

The grid runs over units (see `tpu_units`) and chunks of KV heads. A unit walks its pages in steps of a few
hundred keys, the queries of one KV head as rows of one matrix product (see `tpu_kernel`).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_codes import tokens_of
from pallas_kernels.layout import LANES, KVTiles
from pallas_kernels.paged_attention.reach import Reach
from pallas_kernels.paged_attention.tpu_codes import in_halves, of_halves
from pallas_kernels.paged_attention.tpu_kernel import attend_to_unit
from pallas_kernels.paged_attention.tpu_plan import Plan, copies_of, make_plan, tile_of_batch
from pallas_kernels.paged_attention.tpu_ring import CURSOR
from pallas_kernels.paged_attention.tpu_softmax import MASKED

RING = 4
"""Steps that VMEM holds at once: one is computed, the others are in flight."""
MAX_STEP_KEYS = 1024
STEP_BYTES = 2**20
"""Most VMEM one step's keys and values take, scales aside."""
MAX_SPAN_KEYS = 256
"""Keys that are multiplied at once."""
MAX_HEADS = 8
"""KV heads a grid step takes at once."""


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
    chunk_size: int | None = None,
    sinks: Float[Array, "kv_heads q_per_kv"] | None = None,
    last_keys: Int[Array, " tokens"] | None = None,
    max_query_len: int | None = None,
    value_dim: int | None = None,
    plan: Plan | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "tokens kv_heads q_per_kv value_dim"]:
    """See `pallas_kernels.paged_attention.paged_attention`, and `pallas_kernels.latent_attention` for `value_dim`.

    Args:
        plan: what `make_plan` makes of the batch, for a step that has made it already; None = it is made here.

    Raises:
        ValueError: see `make_plan`; or the plan was made without the `last_keys` that are given.
    """
    tokens, kv_heads, group, head_dim = q.shape
    blocks, layers, _, tiles, block_rows, _ = view.shape
    block_size, pages = tokens_of(view), block_tables.shape[1]
    reach = Reach(sliding_window, chunk_size)
    if plan is None:
        plan = make_plan(
            block_tables,
            query_starts,
            kv_lens,
            view,
            tokens=tokens,
            q_per_kv=group,
            reach=reach,
            max_query_len=max_query_len,
            last_keys=last_keys,
        )
    elif last_keys is not None and plan.last_keys is None and max_query_len != 1:
        raise ValueError("last_keys are given, but the plan was made without: give them to plan_attention too")
    units, gathers = len(plan.units.entry), plan.gathers
    tile = tile_of_batch(tokens, max_query_len, group, view.dtype)
    copies = copies_of(view.dtype)
    rows = tile * group * copies
    heads = max(n for n in range(1, min(kv_heads, MAX_HEADS) + 1) if kv_heads % n == 0)
    span_pages, step_pages = _step_pages(heads * tiles * LANES * view.dtype.itemsize, block_size, pages)
    held = KVTiles.of(tiles, value_dim)  # a packed row is multiplied whole, as key and as value
    lanes, value_lanes = len(held.keys) * LANES, len(held.values) * LANES
    in_bf16 = q.dtype == jnp.bfloat16 and view.dtype != jnp.float32

    queries = q if lanes == head_dim else jnp.pad(q, ((0, 0),) * 3 + ((0, lanes - head_dim),))
    if gathers is not None:
        queries = queries[gathers.rows].transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(units, kv_heads, tile * group, lanes)
    queries = in_halves(queries) if copies == 2 else queries

    def block_of_unit(h, u, _, num_units, *__):
        # Units past the last live one name its block again, which moves no memory.
        return jnp.minimum(u, jnp.maximum(num_units[0] - 1, 0)), h, 0, 0

    def own_block(h, u, *_):  # the rows of units that are not live become zero
        return u, h, 0, 0

    in_specs = [pl.BlockSpec((1, heads, rows, lanes), block_of_unit), pl.BlockSpec(memory_space=pltpu.HBM)]
    inputs = [queries, view.reshape(blocks * layers, *view.shape[2:])]
    if sinks is not None:
        of_rows = jnp.repeat(jnp.maximum(sinks.astype(jnp.float32), MASKED), tile, axis=1)
        of_rows = jnp.tile(of_rows, (1, copies))
        in_specs.append(pl.BlockSpec((heads, rows, LANES), lambda h, *_: (h, 0, 0)))
        inputs.append(jnp.broadcast_to(of_rows[..., None], (kv_heads, rows, LANES)))
    if plan.last_keys is not None:
        in_specs.append(pl.BlockSpec((1, 1, LANES), lambda h, u, *more: (block_of_unit(h, u, *more)[0], 0, 0)))
        inputs.append(plan.last_keys)
    out = pl.pallas_call(
        functools.partial(
            attend_to_unit,
            tile=tile,
            scale=scale,
            soft_cap=soft_cap,
            reach=reach,
            span_pages=span_pages,
            held=held,
            compute_dtype=jnp.dtype(jnp.bfloat16 if in_bf16 else jnp.float32),
            layers=layers,
            has_sinks=sinks is not None,
            zero_dead_units=gathers is None,
        ),
        out_shape=jax.ShapeDtypeStruct((*queries.shape[:3], value_lanes), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(plan.units) + 1,
            grid=(kv_heads // heads, units),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((1, heads, rows, value_lanes), block_of_unit if gathers else own_block),
            scratch_shapes=[
                pltpu.VMEM((RING, step_pages, heads, tiles, block_rows, LANES), view.dtype),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, value_lanes), jnp.float32),
                pltpu.VMEM((1, step_pages * block_size), jnp.int32),
                pltpu.SMEM((CURSOR,), jnp.int32),
                pltpu.SemaphoreType.DMA((RING,)),
            ],
        ),
        # Every id is checked before the launch; the compiler's own checks would double the cost of a DMA's start.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention",
    )(jnp.asarray(layer, jnp.int32)[None], *plan.units, plan.tables, *inputs)

    start_of_v = LANES - held.lanes  # a packed row's product carries K's lanes too
    out = of_halves(out) if copies == 2 else out
    out = out.reshape(units, kv_heads, group, tile, value_lanes)[..., start_of_v:][..., : value_dim or head_dim]
    if gathers is None:
        return out[..., 0, :]
    return jnp.where(gathers.live[:, None, None, None], out[gathers.unit, :, :, gathers.place], 0)


def _step_pages(key_bytes: int, block_size: int, pages: int) -> tuple[int, int]:
    """Return the pages of a span, whose keys fill whole lanes, and of a step, which is whole spans."""
    aligned = LANES // math.gcd(LANES, block_size)  # pages that fill whole lanes
    keys = min(MAX_STEP_KEYS, STEP_BYTES // key_bytes, pages * block_size)
    span = max(1, min(keys, MAX_SPAN_KEYS) // (aligned * block_size)) * aligned
    return span, max(1, keys // (span * block_size)) * span
