"""Keeps blocks in flight: the TPU kernel reads the pool through a ring of VMEM buffers.

A *step* is up to `step_pages` consecutive pages of a unit. Each of its blocks is copied by one DMA from wherever
the block table says to its place in one buffer of the ring, [step pages, heads, tiles, block_size, 128]. The ring runs
``depth - 1`` steps ahead of the arithmetic and goes on to the next unit's steps, so a sequence of one step does not
wait for its memory either.

    step      n            n + 1        ...   n + depth - 1
    buffer    n % depth    waits in VMEM      its DMAs are being started
              computed     or on its way

Ids of blocks come from scalar memory, which has 1 MiB. If all block tables fit in `TABLE_BYTES`, they are there as a
whole (`WholeTables`). Otherwise they stay in HBM, and a unit's table is copied into a window of scalar memory when the
ring reaches the unit before it (`TableWindows`). The window stays until the unit's last step is computed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.paged_attention.tpu_units import Units

TABLE_BYTES = 768 * 2**10
"""Most bytes that block tables take of scalar memory, which has 1 MiB on a TPU v5e."""


def fit_whole(seqs: int, pages: int) -> bool:
    """Tell whether all block tables of this shape fit in scalar memory."""
    return 4 * seqs * pages <= TABLE_BYTES


def table_width(pages: int) -> int:
    """Return the width of a table that is copied alone: `pages` rounded up to whole rows of lanes."""
    return -(-pages // LANES) * LANES


def windows_for(depth: int) -> int:
    """Return the number of windows, a power of two, for a ring of `depth` steps: each step may belong to another unit,
    and the ring's next unit and the one after it need a window too."""
    return 1 << (depth + 1).bit_length()


def deepest_ring(pages: int) -> int:
    """Return the most steps that a ring may hold if its windows are to fit in scalar memory.

    Raises:
        ValueError: not even those of two steps fit.
    """
    depth, width = 2, table_width(pages)
    smallest = 4 * width * windows_for(depth)
    if smallest > TABLE_BYTES:
        raise ValueError(
            f"block tables of {pages} pages: those in use at once take {smallest} bytes, more than {TABLE_BYTES}; "
            "use larger blocks"
        )
    while depth < 64 and 4 * width * windows_for(2 * depth) <= TABLE_BYTES:
        depth *= 2
    return depth


@dataclass(frozen=True)
class WholeTables:
    """Holds all tables: SMEM [seqs * pages], row of the view that holds a page, negative for no block."""

    ids: Any

    def prime(self) -> None:
        """Prepare the first unit."""

    def enter(self, unit: Any, entered: Any) -> None:
        """Prepare `unit` if `entered`; units are entered in order, after `prime` has prepared the first."""

    def row(self, unit: Any, entry: Any) -> Any:
        """Return the view's row for an entry of a unit's table."""
        return self.ids[entry]


@dataclass(frozen=True)
class TableWindows:
    """Copies the table of a unit while the ring fetches the unit before it; has the methods of `WholeTables`.

    Attributes:
        units: SMEM.
        tables: HBM [seqs, 1, width].
        windows: SMEM [windows, 1, width], a power of two of them; the low bits of a unit's number pick its window.
        sems: a DMA semaphore a window.
    """

    units: Units
    tables: Any
    windows: Any
    sems: Any

    def prime(self) -> None:
        self._start(0, True)
        self._wait(0, True)
        self._start(1, True)

    def enter(self, unit: Any, entered: Any) -> None:
        self._wait(unit, entered)
        self._start(unit + 1, entered)

    def row(self, unit: Any, entry: Any) -> Any:
        return self.windows[self._window(unit), 0, entry]

    def _window(self, unit: Any) -> Any:
        return unit & (self.windows.shape[0] - 1)

    def _copy(self, unit: Any) -> Any:
        window = self._window(unit)
        return pltpu.make_async_copy(
            self.tables.at[self.units.seq[unit]], self.windows.at[window], self.sems.at[window]
        )

    def _start(self, unit: Any, entered: Any) -> None:
        pl.when(entered & (unit < self.units.num_units[0]))(lambda: self._copy(unit).start())

    def _wait(self, unit: Any, entered: Any) -> None:
        pl.when(entered & (unit < self.units.num_units[0]))(lambda: self._copy(unit).wait())


CURSOR = 4
"""Scalars of a `Ring.cursor`."""
UNIT, ENTRY, LEFT, TAKEN = range(CURSOR)

UNROLL = 8
"""DMAs that one turn of the loop starts, in straight-line code, if a step is not full."""


@dataclass(frozen=True)
class Ring:
    """Holds the buffers, and tracks how far the fetching has got.

    Attributes:
        units: SMEM.
        tables: which row of `view` holds a page.
        view: HBM [rows, kv_heads, tiles, block_size, 128], beginning with the layer's row of the first block.
        buffers: VMEM [depth, step_pages, heads, tiles, block_size, 128].
        sems: one DMA semaphore a buffer.
        cursor: SMEM [CURSOR]: the unit to fetch next, where in its table and how many pages of it are left, and the
            number of steps taken out of the ring.
        first_head: the first of the `heads` to fetch.
        in_use: steps, the last ones that were taken, whose buffers are not fetched into during a step.
    """

    units: Units
    tables: WholeTables | TableWindows
    view: Any
    buffers: Any
    sems: Any
    cursor: Any
    first_head: Any
    in_use: int = 1

    @property
    def depth(self) -> int:
        return self.buffers.shape[0]

    @property
    def step_pages(self) -> int:
        return self.buffers.shape[1]

    def prime(self) -> None:
        """Begin with the first unit: start as many steps as the ring holds ahead."""
        self.tables.prime()
        self.cursor[UNIT] = 0
        self.cursor[ENTRY] = self.units.entry[0]
        self.cursor[LEFT] = self.units.num_pages[0]
        self.cursor[TAKEN] = 0
        # The buffers that are left are those of the steps that are fetched while the first ones are computed.
        pl.loop(0, self.depth - self.in_use)(self.fetch)

    def taken(self):
        """Return the buffer of the step to compute next."""
        return lax.rem(self.cursor[TAKEN], self.depth)

    def free(self):
        """Return the buffer of the step that has been in use longest, to be overwritten."""
        return lax.rem(self.cursor[TAKEN] + (self.depth - self.in_use), self.depth)

    def release(self) -> None:
        """Count the step in `taken` as computed."""
        self.cursor[TAKEN] += 1

    def fetch_share(self, at, share: int, shares: int, wanted: Any = True) -> None:
        """Start one of `shares` shares of the next step's DMAs, where `wanted` and there are any, without a branch.

        The compiler gives each start a predicate, so that a step of any size is fetched amid a block of arithmetic.
        """
        unit, entry = self.cursor[UNIT], self.cursor[ENTRY]
        count = jnp.where(wanted & (unit < self.units.num_units[0]), self.cursor[LEFT], 0)
        last = entry + jnp.maximum(count - 1, 0)  # loads have no predicate: none may be beyond the table
        for page in range(share * self.step_pages // shares, (share + 1) * self.step_pages // shares):
            # A step of many pages has some hundred of these: operators take longer to trace than `lax`.
            here = lax.min(lax.add(entry, np.int32(page)), last)
            pl.when(lax.gt(count, np.int32(page)))(functools.partial(self._start, unit, here, at, page))
        if share + 1 == shares:
            self._move_on(wanted)

    def fetch(self, at) -> None:
        """Start the next step's DMAs, if there is a next step."""
        unit, entry = self.cursor[UNIT], self.cursor[ENTRY]
        count = jnp.minimum(self.cursor[LEFT], self.step_pages)

        def start_page(page):
            self._start(unit, entry + page, at, page)

        @pl.when(unit < self.units.num_units[0])
        def _():
            even: Any = 0
            if self.step_pages > UNROLL:
                even = lax.div(count, UNROLL) * UNROLL

                @pl.loop(0, even, step=UNROLL)
                def _(start):
                    for i in range(UNROLL):
                        start_page(start + i)

            pl.loop(even, count)(start_page)
            self._move_on()

    def wait(self, at, count) -> None:
        """Wait for the DMAs of a step of `count` pages, one power of two at a time."""
        # A wait takes a size that is known when traced, so the count is waited for bit by bit, not page by page.
        for bit in range(self.step_pages.bit_length()):

            @pl.when((count >> bit) & 1 != 0)
            def _(pages: int = 1 << bit) -> None:
                self._wait(at, pages)

    def wait_whole(self, at, count) -> None:
        """Wait for the DMAs of a step of `count` pages, at once if it is whole."""
        whole = count == self.step_pages
        pl.when(whole)(lambda: self._wait(at, self.step_pages))
        pl.when(~whole & (count > 0))(lambda: self.wait(at, count))

    def _wait(self, at, pages: int) -> None:
        place = self.buffers.at[at, pl.ds(0, pages)]
        # A wait uses only the size of its copy, so any source will do.
        pltpu.make_async_copy(place, place, self.sems.at[at]).wait()

    def _start(self, unit, entry, at, page) -> None:
        # A missing page has row -1. Row 0 is copied in its place, so that waiting needs no exception for it.
        self._dma(lax.max(self.tables.row(unit, entry), np.int32(0)), at, page).start()

    def _dma(self, row, at, page):
        heads = self.buffers.shape[2]
        source = self.view.at[row]
        if heads < self.view.shape[1]:
            source = source.at[pl.ds(self.first_head, heads)]
        return pltpu.make_async_copy(source, self.buffers.at[at, page], self.sems.at[at])

    def _move_on(self, wanted: Any = True) -> None:
        unit, left = self.cursor[UNIT], self.cursor[LEFT] - self.step_pages
        # The cursor moves to the unit's next step or, after its last one, to the next unit's first step.
        done, stays = wanted & (left <= 0), jnp.logical_not(wanted)
        following = jnp.minimum(unit + 1, len(self.units.entry) - 1)
        self.tables.enter(unit + 1, done)
        entry = jnp.where(stays, self.cursor[ENTRY], self.cursor[ENTRY] + self.step_pages)
        left = jnp.where(stays, self.cursor[LEFT], left)
        self.cursor[UNIT] = jnp.where(done, unit + 1, unit)
        self.cursor[ENTRY] = jnp.where(done, self.units.entry[following], entry)
        self.cursor[LEFT] = jnp.where(done, self.units.num_pages[following], left)
