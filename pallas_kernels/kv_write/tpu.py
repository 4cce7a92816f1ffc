"""Implements kv_write as a Pallas Mosaic TPU kernel, in place.

One token's row is less than a memory tile (bf16 packs two rows in one), so a single row cannot be a DMA.
The unit of work is a *run*: consecutive tokens that fill consecutive slots of one block. Its block, or the tile of
rows that has all its tokens, is read into VMEM, the new rows are rolled to their place and merged in, and it is written
back: a decode moves a tile, a prompt blocks. Runs go through a ring
of buffers, reads of later runs and writes of earlier ones in flight while one is merged.

The scales of int8 rows lie in a lane a token, a 32-bit word each (`pallas_kernels.kv_codes`): they are rolled along
lanes and merged in the same way.

Two runs of the same block would race, so such a batch (an engine never makes one: a step's tokens of a block
are consecutive) is detected beforehand and its runs go one at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.counting_loop import loop
from pallas_kernels.kv_codes import TPU_TILE, check_tpu_view, encode, has_scales, stored, tokens_of
from pallas_kernels.layout import LANES

RING_BYTES = 20 * 2**20
"""VMEM that the ring of block and row buffers may hold. A block of 128 tokens with 8 heads is half a MiB and its rows
more: fewer than eight would be waited for, and half as many with heads of 256."""
SPARE_VMEM = 4 * 2**20
"""VMEM for the compiler's temporaries."""
MAX_RING = 32
MAX_WORDS_BYTES = 4 * 2**20
"""VMEM that the scales of all tokens may take."""


class Runs(NamedTuple):
    """Lists runs of tokens whose slots follow each other in one block; the first `num_runs` entries of `first` count.

    Nothing here needs a gather: on a TPU a small operation before the launch costs more than scalars in the kernel.
    """

    slots: Int[Array, " tokens"]
    first: Int[Array, " tokens"]
    """Each run's first token."""
    end: Int[Array, " tokens"]
    """At a run's first token, one past its last token."""
    num_runs: Int[Array, " 1"]
    shared: Int[Array, " 1"]
    """Nonzero when two runs meet in a block."""


class _Moved(NamedTuple):
    """Says how much of a block a run moves: rows of the block, and rows of the window that holds its new ones."""

    rows: int
    window: int


def _kernel(layer, *refs):
    """Merge runs of tokens into their blocks.

    SMEM: layer [1]; the fields of `Runs`.
    HBM: the view, not used; rows [kv_heads, tiles, padded tokens, 128]; and, after `words`, the view, aliased.
    VMEM: with scales, words int32 [padded tokens / 128, kv_heads, tiles, 1, 128] with a block's lanes before token 0;
    block_buf [ring, kv_heads, tiles, block_rows, 128], rows_buf likewise with the rows' windows.
    sems [3, ring]: a block's read, its rows' read, its write.
    """
    runs = Runs(*refs[: len(Runs._fields)])
    _, rows, *words, view, block_buf, rows_buf, sems = refs[len(runs) :]
    ring, _, _, block_rows, _ = block_buf.shape
    block_size = tokens_of(block_buf)
    wide = jnp.int32 if block_buf.dtype.itemsize == 1 else jnp.float32
    align = rows_buf.shape[3] - block_size
    kinds = (_Moved(align, 2 * align), _Moved(block_size, rows_buf.shape[3]))[align == block_size :]

    def place(run):
        """Return (block, offset in it of the run's first slot, tokens)."""
        token = runs.first[run]
        return *_divmod(runs.slots[token], block_size), runs.end[token] - token

    def each_kind(run, do):
        """Call ``do(moved)`` for what the run moves: the tile of its tokens, or the whole block if it has several."""
        if len(kinds) == 1:
            do(kinds[0])
            return
        _, offset, count = place(run)
        in_one_tile = (offset & -align) == ((offset + count - 1) & -align)
        lax.cond(in_one_tile, lambda: do(kinds[0]), lambda: do(kinds[1]))

    def first_row(run, moved):
        """Return the first row of the block that is moved."""
        return pl.multiple_of(place(run)[1] & -moved.rows, align) if moved.rows < block_size else 0

    def window_of(run, moved):
        """Return (first row of the window in `rows`, its rows that exist, rows by which the window is rolled so that
        the run is in place).

        A window holds all tokens of its run; what is rolled around its ends is of no run and is not merged.
        """
        token, offset = runs.first[run], place(run)[1] - first_row(run, moved)
        fetched = min(moved.window, rows.shape[2])
        start = jnp.minimum(token & -align, rows.shape[2] - fetched)
        shift = start + offset - token
        return pl.multiple_of(start, align), fetched, jnp.where(shift < 0, shift + moved.window, shift)

    def copies(run, moved, outward, *, scales_alone=False):
        """Return the DMAs of a run's part of its block: one, and one for the scales that lie apart from it."""
        at, home = run & (ring - 1), view.at[place(run)[0], layer[0]]
        scales = pl.ds(block_size, block_rows - block_size)
        ends = [(home.at[:, :, scales], block_buf.at[at, :, :, scales])] if words else []
        if moved.rows < block_size:
            tile = home.at[:, :, pl.ds(first_row(run, moved), moved.rows)]
            ends.append((tile, block_buf.at[at, :, :, pl.ds(0, moved.rows)]))
        elif not scales_alone:
            ends = [(home, block_buf.at[at])]
        sem = sems.at[2 if outward else 0, at]
        return [pltpu.make_async_copy(*(pair[::-1] if outward else pair), sem) for pair in ends]

    def each_read(run, moved, do):
        """Call ``do(copy)`` for the DMAs that read what is needed of the block before: if the run fills it, only the
        words of scales, which have bits that belong to no token."""
        if moved.rows < block_size:
            for copy in copies(run, moved, outward=False):
                do(copy)
            return
        fills = place(run)[2] == block_size
        for alone, is_so in ((False, ~fills), (True, fills)):

            @pl.when(is_so)
            def _(alone=alone):
                for copy in copies(run, moved, outward=False, scales_alone=alone):
                    do(copy)

    def rows_copy(run, moved):
        at = run & (ring - 1)
        start, fetched, _ = window_of(run, moved)
        to = rows_buf.at[at, :, :, pl.ds(0, fetched)]
        return pltpu.make_async_copy(rows.at[:, :, pl.ds(start, fetched)], to, sems.at[1, at])

    def start_reads(run):
        def start(moved):
            rows_copy(run, moved).start()
            each_read(run, moved, lambda copy: copy.start())

        each_kind(run, start)

    def wait_for_write(run):
        def wait(moved):
            for copy in copies(run, moved, outward=True):
                copy.wait()

        each_kind(run, wait)

    def merge_and_start_write(run):
        each_kind(run, lambda moved: merge(run, moved))

    def merge(run, moved):
        rows_copy(run, moved).wait()
        each_read(run, moved, lambda copy: copy.wait())
        (*_, shift), (_, offset, count) = window_of(run, moved), place(run)
        at, first = run & (ring - 1), first_row(run, moved)
        here, window = pl.ds(0, moved.rows), pl.ds(0, moved.window)
        row = first + lax.broadcasted_iota(jnp.int32, (moved.rows, LANES), 0)
        mine = (row >= offset) & (row < offset + count)
        for head in range(block_buf.shape[1]):
            for tile in range(block_buf.shape[2]):
                new = pltpu.roll(rows_buf[at, head, tile, window].astype(wide), shift, 0)[: moved.rows]
                old = block_buf[at, head, tile, here].astype(wide)
                block_buf[at, head, tile, here] = jnp.where(mine, new, old).astype(block_buf.dtype)
                if words:
                    merge_scales(at, head, tile, offset, count, runs.first[run] - offset + block_size)
        for copy in copies(run, moved, outward=True):
            copy.start()

    def merge_scales(at, head, tile, offset, count, start):
        """Merge a run's scales into a block; `start` is the lane of all words that lands in lane 0 of the block's."""
        first_row, shift = lax.div(start, LANES), LANES - lax.rem(start, LANES)
        lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        left, right = (pltpu.roll(words[0][first_row + i, head, tile], shift, 1) for i in range(2))
        new = jnp.where(lane < shift, left, right)
        scale_rows = pl.ds(block_size, TPU_TILE)
        old = pltpu.bitcast(block_buf[at, head, tile, scale_rows], jnp.int32)
        row = lax.broadcasted_iota(jnp.int32, old.shape, 0)
        merged = jnp.where((row == 0) & (lane >= offset) & (lane < offset + count), new, old)
        block_buf[at, head, tile, scale_rows] = pltpu.bitcast(merged, block_buf.dtype)

    num_runs = runs.num_runs[0]

    @pl.when(runs.shared[0] != 0)
    def _one_at_a_time():
        @loop(0, num_runs)
        def _(run):
            start_reads(run)
            merge_and_start_write(run)
            wait_for_write(run)

    @pl.when(runs.shared[0] == 0)
    def _pipelined():
        ahead = ring // 2

        @loop(0, num_runs + ring)
        def _(i):
            @pl.when((i >= ring) & (i - ring < num_runs))
            def _():
                wait_for_write(i - ring)

            @pl.when(i < num_runs)
            def _():
                start_reads(i)

            @pl.when((i >= ahead) & (i - ahead < num_runs))
            def _():
                merge_and_start_write(i - ahead)


def find_runs(slots: Int[Array, " tokens"], blocks: int, block_size: int) -> Runs:
    """Return the runs of a step's slots, which are the same for all layers of a view of `blocks` blocks."""
    slots = slots.astype(jnp.int32)
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
    shared = jnp.any((homes[1:] == homes[:-1]) & (homes[1:] < blocks)).astype(jnp.int32)
    return Runs(slots, first, end, jnp.sum(starts, dtype=jnp.int32)[None], shared[None])


def _divmod(x, n: int):
    """Return the quotient and remainder of x >= 0, by shift and mask where `n` is a power of two: scalar division takes
    long."""
    if n & (n - 1):
        return lax.div(x, n), lax.rem(x, n)
    return x >> (n.bit_length() - 1), x & (n - 1)


def write_rows(
    view: Float[Array, "blocks layers kv_heads tiles block_size 128"],
    layer: int | Int[Array, ""],
    rows: Float[Array, "tokens kv_heads tiles 128"],
    slots: Int[Array, " tokens"],
    *,
    runs: Runs | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "blocks layers kv_heads tiles block_size 128"]:
    """See `pallas_kernels.kv_write.write_rows`. `view` is aliased to the result.

    Args:
        runs: what `find_runs` makes of `slots`, for a step that has made it already; None = it is made here.

    Raises:
        ValueError: when the view's block size is not a multiple of its dtype's sublane tile, an int8 view is not as
            TPUs hold it, or the scales of all tokens do not fit in VMEM.
    """
    check_tpu_view(view)
    blocks, _, kv_heads, tiles, block_rows, _ = view.shape
    block_size, align = tokens_of(view), 32 // view.dtype.itemsize
    tokens = slots.shape[0]
    runs = find_runs(slots, blocks, block_size) if runs is None else runs
    window = block_size + align
    words = []
    if has_scales(view.dtype):
        rows, scales = encode(rows)
        words.append(_words(scales, lead=block_size))
    rows = jnp.moveaxis(stored(rows, view.dtype), 0, 2)
    if tail := -tokens % align:
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, tail), (0, 0)))
    run_bytes = kv_heads * tiles * (block_rows + window) * LANES * view.dtype.itemsize
    ring = 1 << (max(2, min(MAX_RING, RING_BYTES // run_bytes, tokens)).bit_length() - 1)  # so that & finds a place
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(view.shape, view.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(Runs._fields),
            grid=(1,),
            in_specs=[in_hbm, in_hbm, *[pl.BlockSpec(memory_space=pltpu.VMEM)] * len(words)],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((ring, kv_heads, tiles, block_rows, LANES), view.dtype),
                pltpu.VMEM((ring, kv_heads, tiles, window, LANES), view.dtype),
                pltpu.SemaphoreType.DMA((3, ring)),
            ],
        ),
        input_output_aliases={1 + len(Runs._fields): 0},
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True,  # ids are checked here
            vmem_limit_bytes=ring * run_bytes + sum(word.nbytes for word in words) + SPARE_VMEM,
        ),
        interpret=interpret,
        name="kv_write",
    )(jnp.asarray(layer, jnp.int32)[None], *runs, view, rows, *words)


def _words(scales: Int8[Array, "tokens kv_heads tiles 4"], lead: int) -> Int[Array, "rows kv_heads tiles 1 128"]:
    """Return the scales of all tokens, `lead` lanes before the first; a row more than they fill, as a window spans
    two."""
    tokens, kv_heads, tiles, _ = scales.shape
    rows = -(-(lead + tokens) // LANES) + 1
    if (size := 4 * rows * kv_heads * tiles * LANES) > MAX_WORDS_BYTES:
        raise ValueError(f"scales of {tokens} tokens take {size} bytes of VMEM, more than {MAX_WORDS_BYTES}")
    words = jax.lax.bitcast_convert_type(scales, jnp.int32)
    words = jnp.pad(words, ((lead, rows * LANES - lead - tokens), (0, 0), (0, 0)))
    return jnp.moveaxis(words.reshape(rows, LANES, kv_heads, tiles), 1, 3)[:, :, :, None]
