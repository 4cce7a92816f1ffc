"""Compares simulated times of TPU kernels with published ones: how wrong a simulated figure may be.

``data/tpu_calibration.csv`` has a row for each time that somebody measured and published and whose kernel was compiled
and simulated. Most of these kernels are in no package, so their rows are data; those that can be compiled again are
checked by ``tpu-calibration``. No row is of a v5e or v5p.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from scripts.compiled_code.tpu_chips import CHIPS

FILE = Path(__file__).parent / "data" / "tpu_calibration.csv"
Kind = Literal["decode attention", "prompt attention", "experts", "recurrence", "other"]
"""Kinds of kernels; of "other" (writes of KV, norms, rotations) no time was published."""


class Compared(NamedTuple):
    """Is a launch whose time was measured; times in microseconds."""

    kernel: str
    kind: str
    chip: str
    measured: float
    simulated: float
    source: str

    @property
    def error(self) -> float:
        """Return by which share the simulated time differs from the measured one."""
        return abs(self.simulated / self.measured - 1)


@cache
def compared() -> tuple[Compared, ...]:
    """Return all rows of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(
            Compared(
                row["kernel and shape"],
                row["kind"],
                row["chip"],
                float(row["measured us"]),
                float(row["simulated us"]),
                row["source of the measured time"],
            )
            for row in csv.DictReader(file)
        )


def rank_correlation(rows: Sequence[Compared]) -> float:
    """Return Spearman's correlation of measured and simulated times."""
    ranks = [np.argsort(np.argsort(times)) for times in ([r.measured for r in rows], [r.simulated for r in rows])]
    return float(np.corrcoef(*ranks)[0, 1])


def error_text(kind: Kind, chip: str) -> str:
    """Return what a simulated time of a kernel of this kind on a chip was found to be wrong by.

    The errors of its kind on the chip count, else those of its kind, else those of all kinds on the chip.
    """
    if not CHIPS[chip].measured:
        return "chip unmeasured"
    of_kind = [row for row in compared() if row.kind == kind]
    here = [row for row in of_kind if row.chip == chip]
    if rows := here or of_kind:
        return _errors(rows) + ("" if here else f" on {rows[0].chip}")
    return "kind unmeasured; others " + _errors([row for row in compared() if row.chip == chip])


def _errors(rows: Sequence[Compared]) -> str:
    errors = [row.error for row in rows]
    return f"{100 * statistics.median(errors):.1f} % (worst {100 * max(errors):.0f} %, {len(errors)} rows)"
