"""Decides how many bytes of each device the pool gets."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jpaged.execution.mesh import platform
from pallas_kernels.cgroups import cgroups

GPU_SHARE = 0.95
"""Share of a GPU that programs may take where the user names none: the rest is for CUDA's context and its libraries.
XLA's own default is 0.75."""
VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables with the user's share; XLA refuses both at once."""


def gpu_share(environment: MutableMapping[str, str] = os.environ) -> float:
    """Return the share that the user has chosen, or else `GPU_SHARE`."""
    return next((float(environment[name]) for name in VARIABLES if environment.get(name)), GPU_SHARE)


def claim_gpu_share(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set JAX's share of each GPU; has no effect once its devices are in use, or without a GPU."""
    if not any(environment.get(name) for name in VARIABLES):
        environment[VARIABLES[0]] = str(GPU_SHARE)


logger = logging.getLogger(__name__)

KIB = 1 << 10
CPU_POOL_LIMIT = 4 << 30
"""Most bytes of host memory that a pool may grow to on CPU by default."""
CPU_POOL_PART = 8
"""On CPU a pool without a requested size is one part in this many of the free memory, for other programs' sake; see
`_steady`."""


@dataclass(frozen=True)
class DeviceMemory:
    """Describes the memory of one device.

    Attributes:
        limit: bytes that programs may take; on a host, the bytes that are free now.
        used: bytes of `limit` that are taken already.
        is_host: the device is the CPU; no room is reserved for temporaries besides the pool.
    """

    limit: int
    used: int = 0
    is_host: bool = False


@dataclass(frozen=True)
class ProgramSize:
    """The memory of a program, as its compiler reports it.

    Attributes:
        temporary_bytes: bytes on each device besides weights and pool.
        argument_bytes: bytes on each device of weights and pool as the compiler lays them out, and of the batch.
        compile_seconds: seconds that the compiler took.
    """

    name: str
    temporary_bytes: int
    argument_bytes: int
    compile_seconds: float


def pool_bytes(
    memory: DeviceMemory,
    *,
    requested: int | None,
    memory_utilization: float,
    temporary_bytes: int,
    adapter_bytes: int = 0,
    useful_bytes: int,
    sequence_bytes: int = 0,
) -> int:
    """Return how many bytes the pool gets on each device.

    Args:
        requested: kv_cache_memory_bytes; used unchanged if it is free.
        memory_utilization: share of the device's memory that weights, temporaries and pool may take together.
            On CPU: most of the memory free now that the pool may come to take, within `CPU_POOL_LIMIT`.
        temporary_bytes: what the largest step needs besides weights and pool.
        adapter_bytes: what steps read of low-rank adapters, besides those in the pool.
        useful_bytes: what max_num_seqs sequences of max_model_len tokens need; more is never taken.
        sequence_bytes: what one of them needs: on CPU the pool holds it even where that is more than one part in
            `CPU_POOL_PART` of the free memory.

    Raises:
        ValueError: weights and temporaries leave nothing, or not what was requested.
    """
    if requested is not None:
        free = memory.limit - memory.used - adapter_bytes
        if requested > free:
            aside = f", with {adapter_bytes:,} for adapters" if adapter_bytes else ""
            raise ValueError(
                f"kv_cache_memory_bytes={requested:,} does not fit a device with {free:,} bytes free{aside}"
            )
        return requested
    budget = int(memory.limit * memory_utilization)
    if memory.is_host:
        budget = min(budget, CPU_POOL_LIMIT, max(_steady(memory.limit // CPU_POOL_PART), sequence_bytes))
    else:
        budget -= memory.used + temporary_bytes + adapter_bytes
    if budget <= 0:
        raise ValueError(
            f"no memory is left for the pool: memory_utilization={memory_utilization} of {memory.limit:,} bytes, "
            f"{memory.used:,} in use by weights, {temporary_bytes:,} for temporaries"
            + (f", {adapter_bytes:,} for adapters" if adapter_bytes else "")
        )
    return min(budget, useful_bytes)


def _steady(size: int) -> int:
    """Return the largest of 1, 1.5, 2, 3, 4, 6, ... powers that is no more than `size` bytes.

    Free memory is never twice the same, and a pool of another size makes every compiled program another: only programs
    for a pool of the size of the last start are found in the caches on disk.
    """
    power = 1 << max(size, 1).bit_length() - 1
    return min(size, power + power // 2 if size >= power + power // 2 else power)


def device_memory(mesh: Mesh, params: Any) -> DeviceMemory:
    """Return the memory of the mesh's first device in this process at this moment, with the weights in it."""
    if platform(mesh) == "cpu":
        return DeviceMemory(host_memory_available(), is_host=True)
    stats = mesh.local_devices[0].memory_stats()
    return DeviceMemory(stats["bytes_limit"], max(stats["bytes_in_use"], device_bytes(params)))


def memory_limit(mesh: Mesh) -> int:
    """Return how many bytes programs may take of each device; 0 for a host, which has no such limit."""
    return 0 if platform(mesh) == "cpu" else mesh.local_devices[0].memory_stats()["bytes_limit"]


def device_bytes(params: Any) -> int:
    """Return how many bytes one device holds of a tree of sharded arrays, or of their shapes."""
    leaves = jax.tree.leaves(params)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def host_memory_available(root: Path = Path("/")) -> int:
    """Return how many bytes of host memory programs can still take without swapping, or without being killed where a
    container has a limit: the machine's free memory says nothing of that.

    Pages of files that this process has mapped, weights perhaps, count as taken, though Linux could drop them.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    try:
        free = _number(root / "proc/meminfo", "MemAvailable:") * KIB
        mapped = _number(root / "proc/self/status", "RssFile:") * KIB
    except OSError:
        logger.debug("no /proc/meminfo: assuming 8 GiB of free host memory")
        return 8 << 30
    return max(0, min([free, *_left_by_cgroups(root)]) - mapped)


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """Yield the bytes that each memory limit of this process's cgroups leaves; pages of files, which are dropped at
    need, do not count as used."""
    for version, folder in cgroups(root, "memory"):
        limit, used, prefix = _CGROUP_FILES[version]
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            yield left + sum(_number(folder / "memory.stat", f"{prefix}{kind}_file") for kind in ("active", "inactive"))


_CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By version: names of the files with a cgroup's limit and use, and what the names in ``memory.stat`` begin with where
the groups within it count too."""


def _number(file: Path, name: str) -> int:
    """Return the number that a line such as ``RssFile:   123 kB`` of the file tells; 0 if there is no such line."""
    with open(file) as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(name))


def program_size(name: str, lowered: jax.stages.Lowered) -> ProgramSize:
    """Compile a program to learn its memory; nothing is run.

    Raises:
        ValueError: the program needs more memory than the device has, which a TPU's compiler says with its numbers.
        RuntimeError: the compiler does not say what a program needs.
    """
    start = time.perf_counter()
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"the {name} does not fit the device: {str(error).splitlines()[0]}") from error
    if memory is None:
        raise RuntimeError("this backend does not say what a step needs: set kv_cache_memory_bytes")
    seconds = time.perf_counter() - start
    return ProgramSize(name, memory.temp_size_in_bytes, memory.argument_size_in_bytes, seconds)
