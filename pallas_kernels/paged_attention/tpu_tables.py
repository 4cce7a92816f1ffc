"""Gives the TPU kernel the ids of blocks from scalar memory: all tables at once, or those of the current units.

Scalar memory has 1 MiB. Block tables that take more than `TABLE_BYTES` stay in HBM; a unit's table is then copied into
a window of scalar memory when the ring reaches the unit before it. The window stays until the unit's last step is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
