"""Decides which cached blocks lie on disk, and when reading them beats computing their tokens; it moves no byte.

Read in this order: transfers, index, break_even, prefetch, tier. `jpaged.execution.transfer.disk` has the file and the
thread that writes and reads it.
"""

from jpaged.memory.disk.break_even import BreakEven
from jpaged.memory.disk.index import DiskIndex, StoredBlock
from jpaged.memory.disk.prefetch import Prefix
from jpaged.memory.disk.tier import DiskStats, DiskTier
from jpaged.memory.disk.transfers import BlockStore, DiskFill, DiskRead, DiskWrite

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
]
