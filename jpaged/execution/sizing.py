"""How many bytes of each device the pool gets."""

from __future__ import annotations

import logging
from typing import Any

import jax
from jax.sharding import Mesh

from jpaged.execution.mesh import platform

logger = logging.getLogger(__name__)

CPU_POOL_LIMIT = 4 << 30
"""Most bytes of host memory taken on CPU without being asked for: other programs live there too."""


def pool_bytes(
    mesh: Mesh,
    params: Any,
    *,
    requested: int | None,
    memory_utilization: float,
    temporary_bytes: int,
    useful_bytes: int,
) -> int:
    """Bytes of the pool on each device.

    Args:
        requested: kv_cache_memory_bytes; taken as it is.
        memory_utilization: share of the device's memory that weights, temporaries and pool may take together.
            On CPU: share of the memory free now, and at most `CPU_POOL_LIMIT`.
        temporary_bytes: what the largest step needs beside weights and pool.
        useful_bytes: what max_num_seqs sequences of max_model_len tokens need; more is never taken.

    Raises:
        ValueError: weights and temporaries leave nothing.
    """
    if requested is not None:
        return requested
    if platform(mesh) == "cpu":
        limit, used = host_memory_available(), 0
        budget = min(int(limit * memory_utilization), CPU_POOL_LIMIT)
    else:
        stats = mesh.devices.flat[0].memory_stats()
        limit, used = stats["bytes_limit"], max(stats["bytes_in_use"], device_bytes(params))
        budget = int(limit * memory_utilization) - used - temporary_bytes
    if budget <= 0:
        raise ValueError(
            f"no memory is left for the pool: memory_utilization={memory_utilization} of {limit:,} bytes, "
            f"{used:,} in use by weights, {temporary_bytes:,} for temporaries"
        )
    return min(budget, useful_bytes)


def device_bytes(params: Any) -> int:
    """Bytes one device holds of a (sharded) tree of arrays."""
    leaves = jax.tree.leaves(params)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def host_memory_available() -> int:
    """Bytes of host memory that programs can still take without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        logger.debug("no /proc/meminfo: assuming 8 GiB of free host memory")
    return 8 << 30
