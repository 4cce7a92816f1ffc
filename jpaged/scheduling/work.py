"""Work on the pool: what a step asks the device to do with whole blocks before its tokens are computed.

A kind of work has a name, a phase and a device's half (`jpaged.execution.work`). The host's half is a list of values,
which is in the step by the kind's name; no kind is in a step that has nothing for it to do.
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


TO_DISK = "to_disk"
DROPPED = "dropped"
SWAP_OUT = "swap_out"
SWAP_IN = "swap_in"
FROM_DISK = "from_disk"
COPIES = "copies"
ENCODES = "encodes"
LOADS = "loads"

PHASES = {
    TO_DISK: Phase.OUT,
    DROPPED: Phase.OUT,
    SWAP_OUT: Phase.OUT,
    SWAP_IN: Phase.IN,
    FROM_DISK: Phase.IN,
    COPIES: Phase.COPY,
    ENCODES: Phase.MAKE,
    LOADS: Phase.MAKE,
}
"""The phase of each kind: blocks to write to disk; host blocks whose content is of no use any more; blocks that move to
host memory, and back; blocks read from disk; block copies; images to encode; adapters to load."""
