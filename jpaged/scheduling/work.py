"""Work on the pool: what a step asks the device to do with whole blocks before its tokens are computed.

A kind of work has a name, a phase (`work_kinds.py`) and a device's half (`jpaged.execution.work`). The host's half is a
list of values, which is in the step by the kind's name; no kind is in a step that has nothing for it to do.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """When work runs. The phases follow each other, and the forward pass follows them; within one no order counts.

    Attributes:
        OUT: reads blocks for another memory, before anything of the step changes them.
        IN: fills blocks from another memory.
        COPY: copies blocks within the pool.
        MAKE: writes blocks that are made anew, such as images' features.
    """

    OUT = 0
    IN = 1
    COPY = 2
    MAKE = 3


TO_TIERS = "to_tiers"
"""Blocks to write to tiers, host memory or disk: `TierWrite`."""
SWAP_OUT = "swap_out"
"""Blocks that move to host memory: `SwapCopy`; and host blocks that are forgotten first: `HostBlock`."""
SWAP_IN = "swap_in"
"""Blocks that come back from host memory: `SwapCopy`."""
FROM_TIERS = "from_tiers"
"""Blocks to fill with content read from tiers: `TierFill`."""
COPIES = "copies"
"""Copies within the pool: `BlockCopy`."""
ENCODES = "encodes"
"""Images to encode: `Encode`."""
LOADS = "loads"
"""Adapters to write: `AdapterLoad`."""
