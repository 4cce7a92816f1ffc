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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.counting_loop import loop
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
        return self.read(self.ids, unit, entry)

    @property
    def near(self) -> Any:
        """Return the table in scalar memory that `read` takes."""
        return self.ids

    @staticmethod
    def read(near: Any, unit: Any, entry: Any) -> Any:
        """Return what `row` returns."""
        return near[entry]


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
        return self.read(self.windows, unit, entry)

    @property
    def near(self) -> Any:
        return self.windows

    @staticmethod
    def read(near: Any, unit: Any, entry: Any) -> Any:
        return near[unit & (near.shape[0] - 1), 0, entry]

    def _copy(self, unit: Any) -> Any:
        window = unit & (self.windows.shape[0] - 1)
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


class NextStep(NamedTuple):
    """Describes the step that is fetched next.

    Attributes:
        at: the buffer that it is fetched into.
        unit: its unit.
        entry, last: the entries in the unit's table of its first page, and of the unit's last one.
        count: pages of the unit from its first one on; 0 = nothing is fetched.
        wanted: whether the ring counts it as fetched.
    """

    at: Any
    unit: Any
    entry: Any
    last: Any
    count: Any
    wanted: Any


@dataclass(frozen=True)
class Ring:
    """Holds the buffers, and tracks how far the fetching has got.

    Attributes:
        units: SMEM.
        tables: which row of `view` holds a page.
        view: HBM [rows, kv_heads, tiles, block_size, 128], of all layers.
        buffers: VMEM [depth, step_pages, heads, tiles, block_size, 128].
        sems: one DMA semaphore a buffer.
        cursor: SMEM [CURSOR]: the unit to fetch next, where in its table and how many pages of it are left, and the
            number of steps taken out of the ring.
        layer: the row of the layer's first block.
        rows: rows of `view` from there on that are read.
        first_head: the first of the `heads` to fetch.
        jitted: whether what starts a DMA is jitted, see `_start_page`.
        in_use: steps, the last ones that were taken, whose buffers are not fetched into during a step.
    """

    units: Units
    tables: WholeTables | TableWindows
    view: Any
    buffers: Any
    sems: Any
    cursor: Any
    layer: Any
    rows: int
    first_head: Any
    jitted: bool
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

    def next_step(self, wanted: Any = True) -> NextStep:
        """Return the step to fetch next, where `wanted` and there is one, into the buffer that is free."""
        return self._step_into(self.free(), wanted)

    def fetch_share(self, step: NextStep, share: int, shares: int) -> None:
        """Start one of `shares` shares of a step's DMAs, without a branch, and count the step with the last share.

        The compiler gives each start a predicate, so that a step of any size is fetched amid a block of arithmetic.
        """
        for page in range(share * self.step_pages // shares, (share + 1) * self.step_pages // shares):
            self._start(step, np.int32(page))
        if share + 1 == shares:
            self._move_on(step.wanted)

    def fetch(self, at) -> None:
        """Start the next step's DMAs, if there is a next step."""
        step = self._step_into(at, True)

        @pl.when(step.unit < self.units.num_units[0])
        def _():
            count = jnp.minimum(step.count, self.step_pages)
            even: Any = 0
            if self.step_pages > UNROLL:
                even = lax.div(count, UNROLL) * UNROLL

                @loop(0, lax.div(count, UNROLL))
                def _(turn):
                    for i in range(UNROLL):
                        self._start(step, turn * UNROLL + i, surely=True)

            loop(even, count)(functools.partial(self._start, step, surely=True))
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

    def _step_into(self, at, wanted) -> NextStep:
        unit, entry = self.cursor[UNIT], self.cursor[ENTRY]
        count = jnp.where(wanted & (unit < self.units.num_units[0]), self.cursor[LEFT], 0)
        return NextStep(at, unit, entry, entry + jnp.maximum(count - 1, 0), count, wanted)

    def _start(self, step: NextStep, page, *, surely: bool = False) -> None:
        """Start the DMA of a page of a step, if the step has it, as it `surely` may."""
        memory = self.tables.near, self.view, self.buffers, self.sems
        sizes = {"rows": self.rows, "read": self.tables.read, "surely": surely}
        start = _start_page_jitted if self.jitted else _start_page
        start(*memory, self.layer, self.first_head, step, page, **sizes)

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


def _start_page(near, view, buffers, sems, layer, first_head, step: NextStep, page, *, rows, read, surely) -> None:
    """Start the DMA of a page of a step, see `Ring._start`; `read`: that of the tables."""
    entry = step.entry + page
    if not surely:  # a load has no predicate: none may be beyond the table
        entry = jnp.minimum(entry, step.last)

    def start():
        # A missing page has row -1. Row 0 is copied in its place, so that waiting needs no exception for it.
        row, heads = jnp.maximum(read(near, step.unit, entry), 0), buffers.shape[2]
        source = view.at[pl.ds(layer, rows)].at[row]
        if heads < view.shape[1]:
            source = source.at[pl.ds(first_head, heads)]
        pltpu.make_async_copy(source, buffers.at[step.at, page], sems.at[step.at]).start()

    if surely:
        start()
    else:
        pl.when(page < step.count)(start)


_start_page_jitted = jax.jit(_start_page, static_argnames=("rows", "read", "surely"))
"""The same, which JAX traces once and inlines as it lowers the kernel: a decode's basic blocks start some hundred DMAs.
Pallas' interpreter without TPU semantics takes no semaphore as an argument of a jitted function."""
