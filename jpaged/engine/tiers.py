"""Opens the tiers of an engine, host memory and disk, and measures them. Without room on disk there is no such tier."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from jpaged.config import EngineConfig
from jpaged.execution import PoolSpec
from jpaged.execution.transfer.tiers import SAMPLE, BlockFile, BlockMemory, BlockThread, Speeds, to_device
from jpaged.memory import Tier, Tiers
from jpaged.memory.tiers import BreakEven, HostMemory, TierName

logger = logging.getLogger("jpaged")

DEFAULT_DISK_SPACE = 8.0
"""GiB of disk where the settings give no size."""


@dataclass(frozen=True)
class OpenTiers:
    """The open tiers of an engine.

    Attributes:
        tiers: decide which blocks are written and read; the memory manager uses them. None = there are none.
        threads: move the blocks' bytes, one for each tier; the runner uses them.
    """

    tiers: Tiers | None
    threads: Sequence[BlockThread]

    def close(self) -> None:
        """End the threads."""
        for thread in self.threads:
            thread.close()


def host_memory(config: EngineConfig) -> HostMemory:
    """Return the bound on the host memory of adapters, swapped and cached blocks: kv_offloading_size, if given."""
    return HostMemory() if config.kv_offloading_size is None else HostMemory(config.kv_offloading_size * (1 << 30))


def open_tiers(
    config: EngineConfig, spec: PoolSpec, identity: Callable[[], bytes], host: HostMemory | None = None
) -> OpenTiers:
    """Return the tiers that the settings ask for; where the disk fails, those without it, with a warning.

    Args:
        identity: returns what stands for the weights and all else that blocks depend on; it reads all weights.
        host: the bound on host memory, see `host_memory`.

    Raises:
        ValueError: kv_offloading_size or disk_space holds no large page.
    """
    tiers: list[Tier] = []
    threads: list[BlockThread] = []
    openers: dict[TierName, Callable[..., tuple[BlockFile | BlockMemory, Speeds] | None]]
    openers = {"ram": _open_memory, "disk": partial(_open_file, identity)}
    try:
        for name, opens in openers.items():
            if (opened := opens(config, spec)) is not None:
                threads.append(BlockThread(opened[0], name))
                tiers.append(_tier(name, threads[-1], opened[0], opened[1], config, spec))
    except BaseException:
        for thread in threads:
            thread.close()
        raise
    return OpenTiers(Tiers(tiers, host) if tiers else None, threads)


def _tier(
    name: TierName,
    thread: BlockThread,
    opened: BlockFile | BlockMemory,
    speeds: Speeds,
    config: EngineConfig,
    spec: PoolSpec,
) -> Tier:
    device_rate = to_device()
    logger.info(
        "%s tier of %s bytes: writes %.0f MB/s, reads %.0f MB/s after %.2f ms, checksums of a disk included, and %.0f "
        "MB/s to a device; what is read rather than computed is known after the first steps with prompts",
        name,
        f"{opened.num_bytes:,}",
        speeds.write_rate / 1e6,
        speeds.read_rate / 1e6,
        1e3 * speeds.latency,
        device_rate / 1e6,
    )
    even = BreakEven(
        latency=speeds.latency,
        read_rate=speeds.read_rate,
        device_rate=device_rate,
        min_tokens=config.disk_break_even if name == "disk" else config.kv_offloading_break_even,
    )
    salt_bytes = None if config.cache_salt_bytes is None else config.cache_salt_bytes * spec.shards
    tier = Tier(name, spec.layout, thread, opened.num_bytes, spec.shards, even, at_fill=True, salt_bytes=salt_bytes)
    if isinstance(opened, BlockFile):
        tier.only_reads = not opened.writes
        tier.index.load(opened.blocks)
        logger.info("%d blocks are on disk%s", len(tier.index), ", written by another process" * tier.only_reads)
    return tier


def _whole_pages(setting: str, gib: float, spec: PoolSpec) -> int:
    """Return the bytes of the large pages that so many GiB hold."""
    num_bytes, page_bytes = int(gib * (1 << 30)), spec.layout.page_bytes * spec.shards
    if num_bytes < page_bytes:
        raise ValueError(f"{setting}={gib} GiB, {num_bytes:,} bytes, holds no large page of {page_bytes:,} bytes")
    return num_bytes // page_bytes * page_bytes


def _open_memory(config: EngineConfig, spec: PoolSpec) -> tuple[BlockMemory, Speeds] | None:
    if config.kv_offloading_size is None:
        return None
    memory = BlockMemory(_whole_pages("kv_offloading_size", config.kv_offloading_size, spec))
    return memory, memory.measure()


def _open_file(identity: Callable[[], bytes], config: EngineConfig, spec: PoolSpec) -> tuple[BlockFile, Speeds] | None:
    folder = config.disk_folder
    if folder is None:
        return None
    space = DEFAULT_DISK_SPACE if config.disk_space is None else config.disk_space
    num_bytes, page_bytes = _whole_pages("disk_space", space, spec), spec.layout.page_bytes * spec.shards
    try:
        sample = BlockFile(folder, min(num_bytes, SAMPLE))
        try:
            speeds = sample.measure()
        finally:
            sample.close()
        return BlockFile(folder, num_bytes, identity=identity(), page_bytes=page_bytes), speeds
    except OSError as error:
        warnings.warn(
            f"disk_folder={folder!r}, disk_space={space} GiB: {error}; the engine runs without a disk", stacklevel=3
        )
        return None
