"""Moves blocks between the pool and a file: `BlockFile` has the bytes, `BlockThread` writes and reads them during the
engine, `DiskBlocks` copies them out of the pool and back. Which blocks, and where they lie, is `jpaged.memory.disk`'s.
"""

from jpaged.execution.transfer.disk.block_file import BlockFile, DamagedBlock, Speeds
from jpaged.execution.transfer.disk.block_thread import BlockThread
from jpaged.execution.transfer.disk.disk_blocks import DiskBlocks

__all__ = ["BlockFile", "BlockThread", "DamagedBlock", "DiskBlocks", "Speeds"]
