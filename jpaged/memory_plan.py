"""What an engine takes of each device: weights, temporaries, pool. `jpaged.LLM` and `jpaged plan` both ask here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jpaged.config import EngineConfig
from jpaged.execution import PoolSpec, group_specs, plan_pool
from jpaged.execution.ahead import StepPrograms
from jpaged.execution.one_byte import rows_tile
from jpaged.execution.sizing import DeviceMemory, ProgramSize, device_bytes, device_memory, pool_bytes, program_size
from jpaged.memory import GroupSpec
from jpaged.model_api import CausalLM
from pallas_kernels.platform import Impl

DEFAULT_MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class MemoryPlan:
    """One device's share of an engine.

    Attributes:
        spec: the pool.
        weight_bytes: of the parameters.
        useful_bytes: of a pool in which max_num_seqs sequences of max_model_len tokens never wait for memory.
        memory: what the device has.
        programs: those that were compiled to learn how much to leave for temporaries; none on CPU or where the
            pool's size was given.
    """

    spec: PoolSpec
    weight_bytes: int
    useful_bytes: int
    memory: DeviceMemory
    programs: tuple[ProgramSize, ...]

    @property
    def temporary_bytes(self) -> int:
        """Left for the largest program."""
        return max((program.temporary_bytes for program in self.programs), default=0)


class _KV(TypedDict):
    """How KV memory is laid out; see `plan_pool`."""

    block_size: int
    dtype: jnp.dtype
    shards: int
    tile: int


def plan_memory(
    config: EngineConfig,
    model: CausalLM,
    graphdef: nnx.GraphDef,
    params: Any,
    mesh: Mesh,
    *,
    max_model_len: int,
    dtype: Any,
    memory: DeviceMemory | None = None,
    kernel_impl: Impl | None = None,
    measure: Callable[[StepPrograms], tuple[ProgramSize, ...]] | None = None,
) -> MemoryPlan:
    """Size the pool; compiles the largest step and sampler where temporaries count.

    Args:
        model: with shapes for arrays.
        params: arrays on `mesh`, or shapes with shardings.
        max_model_len: see `resolve_max_model_len`.
        dtype: of the KV.
        memory: of a device; by default what the mesh's first one has now.
        kernel_impl: see `StepPrograms`.
        measure: finds what programs need; by default `compile_largest`.

    Raises:
        ValueError: weights and temporaries leave no room, or not for one large page; or kv_budget does not fit the
            model.
    """
    memory = device_memory(mesh, params) if memory is None else memory
    kv: _KV = {
        "block_size": config.block_size,
        "dtype": jnp.dtype(dtype),
        "shards": config.tensor_parallel_size,
        "tile": rows_tile(mesh),
    }
    groups = model.layer_groups
    if config.kv_budget is not None:
        groups = config.kv_budget.bands(groups, config.block_size)
    useful = _useful_bytes(group_specs(groups, **kv), config.max_num_seqs, max_model_len, config.watermark)

    def size(temporary_bytes: int) -> int:
        return pool_bytes(
            memory,
            requested=config.kv_cache_memory_bytes,
            memory_utilization=config.memory_utilization,
            temporary_bytes=temporary_bytes,
            useful_bytes=useful,
        )

    sizes: tuple[ProgramSize, ...] = ()
    if not memory.is_host and config.kv_cache_memory_bytes is None:
        # Temporaries do not depend on the pool's size: a pool of half the room leaves them the other half.
        programs = step_programs(
            config,
            model,
            graphdef,
            params,
            plan_pool(groups, pool_bytes=size(0) // 2, kv_budget=config.kv_budget, **kv),
            mesh,
            max_model_len=max_model_len,
            kernel_impl=kernel_impl,
        )
        sizes = (measure or compile_largest)(programs)
    temporary = max((program.temporary_bytes for program in sizes), default=0)
    spec = plan_pool(groups, pool_bytes=size(temporary), kv_budget=config.kv_budget, **kv)
    return MemoryPlan(spec, device_bytes(params), useful, memory, sizes)


def compile_largest(programs: StepPrograms) -> tuple[ProgramSize, ...]:
    """The programs that need most beside weights and pool, compiled."""
    return program_size("mixed step", programs.mixed()), program_size("sampler", programs.sampler())


def step_programs(
    config: EngineConfig,
    model: CausalLM,
    graphdef: nnx.GraphDef,
    params: Any,
    spec: PoolSpec,
    mesh: Mesh,
    *,
    max_model_len: int,
    kernel_impl: Impl | None = None,
) -> StepPrograms:
    """The programs of an engine with these settings and this pool."""
    return StepPrograms(
        graphdef=graphdef,
        params=params,
        spec=spec,
        mesh=mesh,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        kernel_impl=kernel_impl,
    )


def resolve_max_model_len(asked: int | None, model_config: Any) -> int:
    """Most tokens of a sequence: what was asked for, or a default within what the model was trained for.

    Raises:
        ValueError: more is asked for than the model was trained for.
    """
    limit = getattr(model_config, "max_position_embeddings", None)
    if asked is None:
        return min(DEFAULT_MAX_MODEL_LEN, limit or DEFAULT_MAX_MODEL_LEN)
    if limit is not None and asked > limit:
        raise ValueError(f"max_model_len={asked} is above the model's max_position_embeddings={limit}")
    return asked


def _useful_bytes(specs: list[GroupSpec], max_num_seqs: int, max_model_len: int, watermark: float) -> int:
    """Bytes with which max_num_seqs sequences of max_model_len tokens never wait for memory."""
    one = sum(math.ceil(max_model_len / s.block_size) * s.layer_bytes * s.num_layers for s in specs)
    return math.ceil(one * max_num_seqs / (1 - watermark) * 1.02)
