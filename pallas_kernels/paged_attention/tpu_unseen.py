"""Keeps keys that no query may see out of a step of the TPU kernels: of pages without a block, and of others' tokens.

The weight of an unseen key is zero, but its value may be anything, and zero times NaN is NaN. So what a value is
multiplied from is made finite in VMEM, where it lies: once a step, not once a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.counting_loop import loop
from pallas_kernels.kv_codes import tokens_of
from pallas_kernels.paged_attention.tpu_ring import TableWindows, WholeTables

NEVER = 2**30
"""Added to the position of a key that no query may see."""


@dataclass(frozen=True)
class MissingBlocks:
    """Hides pages without a block, into which row 0 was copied.

    Attributes:
        tables: see `Ring`.
        buffers: see `Ring`.
        penalty: VMEM int32 [1, keys of a step], `NEVER` for keys of such pages, which puts them beyond any query: an
            addition instead of another comparison. Else zero.
    """

    tables: WholeTables | TableWindows
    buffers: Any
    penalty: Any

    def hide(self, at, unit, entry, pages) -> None:
        """Zero the pages of a step of `pages` pages that have no block, and mark their keys."""
        size = self.penalty.shape[1] // self.buffers.shape[1]
        column = lax.broadcasted_iota(jnp.int32, self.penalty.shape, 1)

        @loop(0, pages)
        def _(page):
            @pl.when(self.tables.row(unit, entry + page) < 0)
            def _():
                here = (column >= page * size) & (column < (page + 1) * size)
                self.penalty[...] = jnp.where(here, NEVER, self.penalty[...])
                self.buffers[at, page] = jnp.zeros(self.buffers.shape[2:], self.buffers.dtype)

    def forget(self) -> None:
        """Forget which pages of a step had no block."""
        self.penalty[...] = jnp.zeros_like(self.penalty)


@dataclass(frozen=True)
class CleanValues:
    """Zeroes values that no query of a step sees.

    Attributes:
        buffers: see `Ring`.
        tiles: the tiles of a row that hold values.
    """

    buffers: Any
    tiles: Any

    def clear(self, at, first, stop) -> None:
        """Zero the values of a step's pages from page `first` up to page `stop`, into which nothing was copied."""

        @loop(first, stop)
        def _(page):
            for tile in self.tiles:
                there = self.buffers.at[at, page, :, tile]
                there[...] = jnp.zeros(there.shape, there.dtype)

    def keep(self, at, first, stop) -> None:
        """Zero the values of a step's keys before `first` and from `stop` on in the pages that have these two."""
        size = tokens_of(self.buffers)
        for edge in (first, stop):
            within = (edge > 0) & (edge < size * self.buffers.shape[1]) & (lax.rem(edge, size) != 0)
            pl.when(within)(partial(self._keep, at, lax.div(edge, size), first, stop))

    def _keep(self, at, page, first, stop) -> None:
        size, bits = tokens_of(self.buffers), 8 * self.buffers.dtype.itemsize
        in_word = 32 // bits  # a word has the same lane of consecutive rows
        row = page * size + in_word * lax.broadcasted_iota(jnp.int32, (size // in_word, 128), 0)

        def below(key):
            """Return words of which the bits of rows before a key are set."""
            found = jnp.where(key > row, -1, 0)
            if in_word == 1:
                return found
            for place in range(1, in_word):
                kept = (1 << (place * bits)) - 1
                found = jnp.where(key - row == place, kept, found)
            return found

        seen = below(stop) & ~below(first)
        for tile in self.tiles:
            for head in range(self.buffers.shape[2]):
                there = self.buffers.at[at, page, head, tile]
                words = pltpu.bitcast(there[...], jnp.int32) & seen
                there[...] = pltpu.bitcast(words, there.dtype)
