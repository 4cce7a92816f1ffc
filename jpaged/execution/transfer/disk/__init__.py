"""Moves bytes of blocks between host memory and a file: `BlockFile` has the bytes, `BlockThread` writes and reads them
during the engine. `jpaged.execution.work.disk` copies them out of the pool and back; which blocks, and where they lie,
is `jpaged.memory.disk`'s.
"""

from jpaged.execution.transfer.disk.block_file import BlockFile, DamagedBlock, Speeds
from jpaged.execution.transfer.disk.block_thread import BlockThread

__all__ = ["BlockFile", "BlockThread", "DamagedBlock", "Speeds"]
