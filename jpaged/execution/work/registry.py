"""Lists the kinds of work on the pool by the device's half of each."""

from __future__ import annotations

from jpaged.execution.work.adapters import Loads
from jpaged.execution.work.base import PoolWork, WorkContext
from jpaged.execution.work.copies import Copies
from jpaged.execution.work.images import Images
from jpaged.execution.work.swapping import SwapIn, SwapOut
from jpaged.execution.work.tiers import FromTiers, ToTiers
from jpaged.scheduling.work_kinds import KINDS

WORKS: list[type[PoolWork]] = [ToTiers, SwapOut, SwapIn, FromTiers, Copies, Images, Loads]
"""One class for each kind of `jpaged.scheduling.work_kinds.KINDS`."""


def pool_works(context: WorkContext) -> dict[str, PoolWork]:
    """Return the kinds of work by name, in the order in which they run: that of their phases."""
    kinds = sorted(WORKS, key=lambda work: KINDS[work.kind].phase)
    return {kind.kind: kind(context) for kind in kinds}
