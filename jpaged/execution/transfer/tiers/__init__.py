"""Keeps bytes of blocks outside of the pool: `BlockMemory` and `BlockFile` have them, a `BlockThread` of each writes
and reads them during steps. `jpaged.execution.work.tiers` copies them out of the pool and back; which blocks, and where
they lie, is `jpaged.memory.tiers`'s.
"""

from jpaged.execution.transfer.tiers.block_file import BlockFile, DamagedBlock, Speeds
from jpaged.execution.transfer.tiers.block_memory import BlockMemory, to_device
from jpaged.execution.transfer.tiers.block_thread import BlockThread

__all__ = ["BlockFile", "BlockMemory", "BlockThread", "DamagedBlock", "Speeds", "to_device"]
