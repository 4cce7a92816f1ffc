"""kv_write as a Pallas Mosaic TPU kernel, in place.

One token's row is less than a memory tile (bf16 packs two rows in one), so it cannot be a DMA of its own.
The unit of work is a *run*: consecutive tokens that fill consecutive slots of one block. Its block is read into
VMEM, the new rows are rolled to their place and merged in, and the block is written back. Runs go through a ring
of buffers, reads of later runs and writes of earlier ones in flight while one is merged.

Two runs of the same block would race, so such a batch (an engine never makes one: a step's tokens of a block
are consecutive) is detected beforehand and its runs go one at a time.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import LANES, pack_kv

RING_BYTES = 4 * 2**20
"""VMEM that the ring of block and row buffers may hold."""
MAX_RING = 64


def _kernel(layer, slots, first, end, num_runs, shared, _, rows, view, block_buf, rows_buf, sems, *, lead):
    """Merge runs of tokens into their blocks.

    SMEM: layer [1]; first, end [tokens] int32: run r holds tokens ``first[r]`` up to ``end[first[r]]``;
    slots [tokens]; num_runs [1]; shared [1]: nonzero when two runs meet in a block.
    HBM: rows [kv_heads, tiles, padded tokens, 128], `lead` zero rows before token 0; view, aliased.
    VMEM: block_buf [ring, kv_heads, tiles, block_size, 128], rows_buf likewise with the rows' windows.
    sems [3, ring]: a block's read, its rows' read, its write.
    """
    ring, _, _, block_size, _ = block_buf.shape
    window = rows_buf.shape[3]
    align = window - block_size

    def place(run):
        """(block, offset of the first slot, tokens, first row of the window in `rows`, roll) of a run."""
        token = first[run]
        slot = slots[token]
        offset = lax.rem(slot, block_size)
        start = token - offset + lead  # the row that lands at offset 0 of the block
        base = pl.multiple_of(lax.div(start, align) * align, align)
        return lax.div(slot, block_size), offset, end[token] - token, base, start - base

    def home(run):
        return view.at[place(run)[0], layer[0]]

    def read_block(run):
        at = lax.rem(run, ring)
        return pltpu.make_async_copy(home(run), block_buf.at[at], sems.at[0, at])

    def read_rows(run):
        at = lax.rem(run, ring)
        span = pl.ds(place(run)[3], window)
        return pltpu.make_async_copy(rows.at[:, :, span], rows_buf.at[at], sems.at[1, at])

    def write_block(run):
        at = lax.rem(run, ring)
        return pltpu.make_async_copy(block_buf.at[at], home(run), sems.at[2, at])

    def fills_block(run):  # then nothing of the old block is needed
        return place(run)[2] == block_size

    def start_reads(run):
        read_rows(run).start()

        @pl.when(~fills_block(run))
        def _():
            read_block(run).start()

    def merge_and_start_write(run):
        read_rows(run).wait()

        @pl.when(~fills_block(run))
        def _():
            read_block(run).wait()

        _, offset, count, _, roll = place(run)
        at = lax.rem(run, ring)
        row = lax.broadcasted_iota(jnp.int32, (block_size, LANES), 0)
        mine = (row >= offset) & (row < offset + count)
        for head in range(block_buf.shape[1]):
            for tile in range(block_buf.shape[2]):
                new = pltpu.roll(rows_buf[at, head, tile].astype(jnp.float32), window - roll, 0)[:block_size]
                old = block_buf[at, head, tile].astype(jnp.float32)
                block_buf[at, head, tile] = jnp.where(mine, new, old).astype(block_buf.dtype)
        write_block(run).start()

    runs = num_runs[0]

    @pl.when(shared[0] != 0)
    def _one_at_a_time():
        @pl.loop(0, runs)
        def _(run):
            start_reads(run)
            merge_and_start_write(run)
            write_block(run).wait()

    @pl.when(shared[0] == 0)
    def _pipelined():
        ahead = ring // 2

        @pl.loop(0, runs + ring)
        def _(i):
            @pl.when((i >= ring) & (i - ring < runs))
            def _():
                write_block(i - ring).wait()

            @pl.when(i < runs)
            def _():
                start_reads(i)

            @pl.when((i >= ahead) & (i - ahead < runs))
            def _():
                merge_and_start_write(i - ahead)


def _find_runs(slots: Int[Array, " tokens"], blocks: int, block_size: int):
    """(first, end, num_runs [1], shared [1]) as `_kernel` wants them."""
    (tokens,) = slots.shape
    index = jnp.arange(tokens, dtype=jnp.int32)
    live = (slots >= 0) & (slots < blocks * block_size)
    before = jnp.concatenate([jnp.full((1,), -2, slots.dtype), slots[:-1]])
    starts = live & ((slots != before + 1) | (slots % block_size == 0))
    stops = jnp.where(starts | ~live, index, tokens)
    next_stop = lax.cummin(stops, reverse=True)
    end = jnp.concatenate([next_stop[1:], jnp.full((1,), tokens, jnp.int32)])
    first = jnp.sort(jnp.where(starts, index, tokens))
    homes = jnp.sort(jnp.where(starts, slots // block_size, blocks))
    shared = jnp.any((homes[1:] == homes[:-1]) & (homes[1:] < blocks))
    return first, end, jnp.sum(starts, dtype=jnp.int32)[None], shared.astype(jnp.int32)[None]


def kv_write(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int[Array, " tokens"],
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """See `pallas_kernels.kv_write.kv_write`. `view` is aliased to the result.

    Raises:
        ValueError: when the view's block size is not a multiple of its dtype's sublane tile.
    """
    blocks, _, kv_heads, tiles, block_size, _ = view.shape
    align = 32 // view.dtype.itemsize
    if block_size % align:
        raise ValueError(f"block_size={block_size} is not a multiple of {align}, the tile of {view.dtype}")
    tokens = slots.shape[0]
    slots = slots.astype(jnp.int32)
    window = block_size + align
    lead = block_size
    tail = window + (-(lead + tokens + window)) % align
    rows = jnp.moveaxis(pack_kv(k, v).astype(view.dtype), 0, 2)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (lead, tail), (0, 0)))
    run_bytes = kv_heads * tiles * (block_size + window) * LANES * view.dtype.itemsize
    ring = max(2, min(MAX_RING, RING_BYTES // run_bytes, tokens))
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        functools.partial(_kernel, lead=lead),
        out_shape=jax.ShapeDtypeStruct(view.shape, view.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(1,),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((ring, kv_heads, tiles, block_size, LANES), view.dtype),
                pltpu.VMEM((ring, kv_heads, tiles, window, LANES), view.dtype),
                pltpu.SemaphoreType.DMA((3, ring)),
            ],
        ),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),  # ids are checked here
        interpret=interpret,
        name="kv_write",
    )(jnp.asarray(layer, jnp.int32)[None], slots, *_find_runs(slots, blocks, block_size), view, rows)
