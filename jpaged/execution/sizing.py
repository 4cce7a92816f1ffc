"""How many bytes of each device the pool gets."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution.batch import empty_batch
from jpaged.execution.buckets import Buckets
from jpaged.execution.mesh import platform, sharding
from jpaged.execution.pool import PoolSpec
from jpaged.execution.sample_step import make_sample_step
from jpaged.execution.sampling_batch import RANKED, greedy_rows
from jpaged.execution.step import make_step
from jpaged.model_api import TENSOR_AXIS

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


def step_temporary_bytes(
    graphdef: nnx.GraphDef,
    params: Any,
    spec: PoolSpec,
    mesh: Mesh,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    vocab_size: int,
) -> int:
    """Bytes a device needs beside weights and pool in the largest step, by compiling it; nothing is run."""
    buckets = Buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    replicated = sharding(mesh)
    pool = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding(mesh, TENSOR_AXIS))
    last = jax.ShapeDtypeStruct((max_num_seqs,), jnp.int32, sharding=replicated)
    batch = empty_batch(buckets.mixed[-1], spec.layout, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    step = make_step(graphdef, spec, mesh).lower(params, pool, batch, last, decode_only=False)
    _, hidden, _ = step.out_info
    hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=replicated)
    rows = greedy_rows(max_num_seqs, vocab_size)
    draw = make_sample_step(graphdef, mesh).lower(params, hidden, rows, last, top=RANKED)
    return max(_temporary_bytes(lowered.compile()) for lowered in (step, draw))


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("this backend does not say what a step needs: set kv_cache_memory_bytes")
    return memory.temp_size_in_bytes
