"""Decides which cached blocks lie on disk, and when reading them beats computing their tokens; it moves no byte.

Read in this order: moves, index, break_even, asked, reading, stats, tier, attaching. `jpaged.execution.transfer.disk`
has the file and the thread that writes and reads it.
"""

from jpaged.memory.disk.attaching import attach_with_disk
from jpaged.memory.disk.break_even import BreakEven
from jpaged.memory.disk.index import DiskIndex, StoredBlock
from jpaged.memory.disk.moves import BlockStore, DiskFill, DiskRead, DiskWrite
from jpaged.memory.disk.reading import Prefix
from jpaged.memory.disk.stats import DiskStats
from jpaged.memory.disk.tier import DiskTier

__all__ = [
    "BlockStore",
    "BreakEven",
    "DiskFill",
    "DiskIndex",
    "DiskRead",
    "DiskStats",
    "DiskTier",
    "DiskWrite",
    "Prefix",
    "StoredBlock",
    "attach_with_disk",
]
