"""Opens an engine's disk tier and measures its disk. If the disk has no room, the engine runs without the tier."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

from jpaged.config import EngineConfig
from jpaged.execution import PoolSpec
from jpaged.execution.transfer.disk import BlockFile, BlockThread
from jpaged.memory import DiskTier
from jpaged.memory.disk import BreakEven

logger = logging.getLogger("jpaged")

DEFAULT_DISK_SPACE = 8.0
"""GiB of disk where the settings give no size."""


@dataclass(frozen=True)
class OpenDisk:
    """An open disk tier.

    Attributes:
        tier: decides which blocks are written and read; the memory manager uses it.
        thread: moves the blocks' bytes; the runner uses it.
    """

    tier: DiskTier
    thread: BlockThread


def open_disk(config: EngineConfig, spec: PoolSpec) -> OpenDisk | None:
    """Return the disk tier that the settings ask for; None if they ask for none, or (with a warning) the disk fails.

    Raises:
        ValueError: disk_space holds no large page.
    """
    folder = config.disk_folder
    if folder is None:
        return None
    space = DEFAULT_DISK_SPACE if config.disk_space is None else config.disk_space
    num_bytes, page_bytes = int(space * (1 << 30)), spec.layout.page_bytes * spec.shards
    if num_bytes < page_bytes:
        raise ValueError(f"disk_space={space} GiB, {num_bytes:,} bytes, holds no large page of {page_bytes:,} bytes")
    file = None
    try:
        file = BlockFile(folder, num_bytes // page_bytes * page_bytes)
        speeds = file.measure()
    except BaseException as error:
        if file is not None:
            file.close()
        if not isinstance(error, OSError):
            raise
        warnings.warn(
            f"disk_folder={folder!r}, disk_space={space} GiB: {error}; the engine runs without a disk", stacklevel=2
        )
        return None
    logger.info(
        "disk tier of %s bytes in %s: writes %.0f MB/s, reads %.0f MB/s after %.2f ms, checksums included; what is "
        "read rather than computed is known after the first steps with prompts",
        f"{file.num_bytes:,}",
        folder,
        speeds.write_rate / 1e6,
        speeds.read_rate / 1e6,
        1e3 * speeds.latency,
    )
    thread = BlockThread(file)
    even = BreakEven(latency=speeds.latency, read_rate=speeds.read_rate, min_tokens=config.disk_break_even)
    tier = DiskTier(spec.layout, thread, num_bytes=file.num_bytes, shards=spec.shards, break_even=even)
    return OpenDisk(tier, thread)
