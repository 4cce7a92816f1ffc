"""Decides which cached blocks lie in host memory and on disk, and when loading them beats computing their tokens; it
moves no byte.

Read in this order: transfers, index, break_even, tier, prefetch, host_memory, tiers. `jpaged.execution.transfer.tiers`
has the stores and the threads that write and read them.
"""

from jpaged.memory.tiers.break_even import BreakEven
from jpaged.memory.tiers.host_memory import HostMemory
from jpaged.memory.tiers.index import StoredBlock, TierIndex
from jpaged.memory.tiers.prefetch import Content, Prefix, Staged
from jpaged.memory.tiers.tier import Tier, TierName, TierStats
from jpaged.memory.tiers.tiers import Tiers
from jpaged.memory.tiers.transfers import BlockStore, TierFill, TierRead, TierWrite

__all__ = [
    "BlockStore",
    "BreakEven",
    "Content",
    "HostMemory",
    "Prefix",
    "Staged",
    "StoredBlock",
    "Tier",
    "TierFill",
    "TierIndex",
    "TierName",
    "TierRead",
    "TierStats",
    "TierWrite",
    "Tiers",
]
