"""Writes the rows of sequences' new tokens from within the attention to them, on TPUs.

A step that only decodes adds a row to the last block of each sequence. The ring reads ahead, so it fetches that block
before the row is there. When the step that has the block was waited for, the row is merged into it in VMEM: attention
reads what the block holds from now on. One row is less than a memory tile, so the whole tile goes back to HBM, from a
ring of tiles apart from the pages': the buffer of the page may be fetched into again before the tile has arrived.

No other sequence of the step may have the block that is written: its fetch may come before the write or after it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_codes import TPU_TILE, tokens_of
from pallas_kernels.layout import LANES

IN_FLIGHT = 8
"""Tiles on their way to HBM at once: a sequence of a few keys takes half a microsecond, a write one."""


@dataclass(frozen=True)
class NewRows:
    """Holds the new rows of a block of the batch, and the tiles that are on their way.

    Attributes:
        view: HBM, as `Ring.view`, written.
        first_head: the first of the heads to write.
        rows: VMEM [heads, tiles, tokens, 128], what the view stores of tokens in whole memory tiles: `rotated_heads`
            gives them so, and XLA need not move them.
        tiles: VMEM [IN_FLIGHT, heads, tiles, rows of a memory tile, 128].
        sems: a DMA semaphore a place of `tiles`.
        count: SMEM [1], tiles that were sent.
        words: VMEM int32 of the shape of `rows`, a row's scales in all of its 128 lanes; None = rows have none.
        scales: VMEM [IN_FLIGHT, heads, tiles, TPU_TILE, 128]; None = rows have none.
    """

    view: Any
    first_head: Any
    rows: Any
    tiles: Any
    sems: Any
    count: Any
    words: Any = None
    scales: Any = None

    def prime(self) -> None:
        """Begin with no tile on its way."""
        self.count[0] = 0

    def merge_into_step(self, units: Any, ids: Any, unit: Any, buffers: Any, at: Any, step: Any, start: Any) -> None:
        """Merge the row of a sequence's new token into a step, if the step has its block.

        Args:
            units, ids, buffers: see `Ring`; the sequence is that of `unit`.
            at: the buffer that has the step.
            step, start: its number, and the position of its first key.
        """
        size, step_pages = tokens_of(buffers), buffers.shape[1]
        position = units.query_pos[unit]

        @pl.when((position >= start) & (position < jnp.minimum(start + step_pages * size, units.key_stop[unit])))
        def _():
            page, offset = lax.div(position - start, size), lax.rem(position - start, size)
            row = ids.row(unit, units.entry[unit] + step * step_pages + page)
            place = lax.rem(units.tile[unit], self.rows.shape[2])
            pl.when(row >= 0)(lambda: self.merge(buffers, at, page, offset, row, place))

    def merge(self, buffers: Any, at: Any, page: Any, offset: Any, row: Any, place: Any) -> None:
        """Merge a token's row into a page of the ring's buffers, and start the write of its tile.

        Args:
            buffers: `Ring.buffers`; `at` is the step's, `page` the page's place in it.
            offset: the token's place in its block.
            row: the row of the view that holds the block.
            place: the token's row in `rows`.
        """
        _, heads, tiles, align, _ = self.tiles.shape
        size, slot = tokens_of(buffers), self.count[0] & (IN_FLIGHT - 1)
        pl.when(self.count[0] >= IN_FLIGHT)(lambda: self.wait(slot))
        first = pl.multiple_of(offset & -align, align)
        mine = lax.broadcasted_iota(jnp.int32, (align, LANES), 0) == offset - first
        # No instruction moves a part of a register by a distance that is not known, but one rotates whole rows of four
        # bytes.
        wide = jnp.int32 if buffers.dtype.itemsize == 1 else jnp.float32
        around = pl.ds(pl.multiple_of(place & -align, align), align)
        to_offset, to_top = ((at_row - place) & (align - 1) for at_row in (offset - first, 0))
        for head in range(heads):
            for tile in range(tiles):
                here = buffers.at[at, page, head, tile, pl.ds(first, align)]
                new = pltpu.roll(self.rows[head, tile, around].astype(wide), to_offset, 0)
                merged = jnp.where(mine, new, here[...].astype(wide)).astype(buffers.dtype)
                here[...] = merged
                self.tiles[slot, head, tile] = merged
                if self.words is not None:
                    there = buffers.at[at, page, head, tile, pl.ds(size, TPU_TILE)]
                    old = pltpu.bitcast(there[...], jnp.int32)
                    word = pltpu.roll(self.words[head, tile, around], to_top, 0)[: old.shape[0]]
                    of_token = lax.broadcasted_iota(jnp.int32, old.shape, 1) == offset
                    of_token &= lax.broadcasted_iota(jnp.int32, old.shape, 0) == 0
                    scales = pltpu.bitcast(jnp.where(of_token, word, old), buffers.dtype)
                    there[...] = scales
                    self.scales[slot, head, tile] = scales
        self._each_copy(slot, row, first, lambda copy: copy.start())
        self.count[0] += 1

    def drain(self) -> None:
        """Wait for all tiles that are on their way."""
        for slot in range(IN_FLIGHT):
            pl.when(slot < self.count[0])(functools.partial(self.wait, slot))

    def wait(self, slot: Any) -> None:
        """Wait for the tile in a place of `tiles`, for which only its size is needed."""
        self._each_copy(slot, 0, 0, lambda copy: copy.wait())

    def _each_copy(self, slot: Any, row: Any, first: Any, do: Any) -> None:
        """Call ``do(copy)`` for the DMAs of a place of `tiles`."""
        _, heads, _, align, _ = self.tiles.shape
        home = self.view.at[row, pl.ds(self.first_head, heads)]
        do(pltpu.make_async_copy(self.tiles.at[slot], home.at[:, :, pl.ds(first, align)], self.sems.at[slot]))
        if self.scales is not None:
            there = home.at[:, :, pl.ds(tokens_of(self.view), TPU_TILE)]
            do(pltpu.make_async_copy(self.scales.at[slot], there, self.sems.at[slot]))
