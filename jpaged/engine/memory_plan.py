"""Plans an engine's memory on each device: weights, temporaries, pool. `jpaged.LLM` and `jpaged plan` both use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jpaged.config import SizedConfig
from jpaged.execution import PoolSpec
from jpaged.execution.caches.adapters import AdapterCache
from jpaged.execution.caches.base import BlockSettings, group_specs
from jpaged.execution.caches.registry import layer_caches
from jpaged.execution.device_memory import (
    DeviceMemory,
    ProgramSize,
    device_bytes,
    device_memory,
    pool_bytes,
    program_size,
)
from jpaged.execution.image_rows import ImageRows, image_examples
from jpaged.execution.kv_dtype import rows_tile
from jpaged.execution.lowering import StepPrograms
from jpaged.memory import GroupSpec, PoolLayout
from jpaged.memory.policies import ImageFeatures
from jpaged.model_api import AdapterGroup, CausalLM, LayerGroup
from pallas_kernels.layout import LANES
from pallas_kernels.platform import Impl

DEFAULT_MAX_MODEL_LEN = 2048
_ANY_POOL = 1 << 62
"""Bytes of a pool that has room for any large page."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that an engine takes of one device.

    Attributes:
        spec: the pool.
        weight_bytes: size of the parameters.
        adapter_bytes: size of the low-rank adapters' matrices that steps read, in addition to the adapters in the pool.
        useful_bytes: size of a pool in which max_num_seqs sequences of max_model_len tokens never wait for memory.
        memory: the memory that the device has.
        programs: programs that were compiled to measure their temporaries; none on CPU or if the pool's size was given.
    """

    spec: PoolSpec
    weight_bytes: int
    adapter_bytes: int
    useful_bytes: int
    memory: DeviceMemory
    programs: tuple[ProgramSize, ...]

    @property
    def temporary_bytes(self) -> int:
        """Return the bytes reserved for the temporaries of the largest program."""
        return max((program.temporary_bytes for program in self.programs), default=0)


def plan_memory(
    config: SizedConfig,
    model: CausalLM,
    graphdef: nnx.GraphDef,
    params: Any,
    mesh: Mesh,
    *,
    max_model_len: int,
    dtype: Any,
    draft_groups: Sequence[LayerGroup] = (),
    adapters: AdapterGroup | None = None,
    memory: DeviceMemory | None = None,
    rows: ImageRows | None = None,
    kernel_impl: Impl | None = None,
    measure: Callable[[StepPrograms], tuple[ProgramSize, ...]] | None = None,
) -> MemoryPlan:
    """Size the pool; where temporaries count, compile the largest programs to measure them.

    Args:
        model: the model, with shapes for arrays.
        params: arrays on `mesh`, or shapes with shardings.
        max_model_len: most tokens of a sequence, see `resolve_max_model_len`.
        dtype: dtype of the KV.
        draft_groups: layer groups of a draft model, which lie in the same pool.
        adapters: layer group of low-rank adapters in the pool; its blocks get the shape of the smallest other group's.
        memory: a device's memory; by default that of the mesh's first device now.
        rows: see `image_rows`.
        kernel_impl: version of the kernels, see `StepPrograms`.
        measure: measures the temporaries of programs; by default `compile_largest`.

    Raises:
        ValueError: weights and temporaries leave no room, or less than one large page; or the settings do not fit the
            model.
    """
    memory = device_memory(mesh, params) if memory is None else memory
    form = BlockSettings(
        config.block_size,
        jnp.dtype(dtype),
        config.tensor_parallel_size,
        rows_tile(mesh),
        config.state_interval,
        config.state_checkpoint_interval is None,
        0 if config.speculative is None else config.speculative.tokens,
    )
    caches = layer_caches([*config.layer_groups(model.layer_groups), *draft_groups], form)
    if not caches:
        return MemoryPlan(PoolSpec.plan((), 0, form), device_bytes(params), 0, 0, memory, ())
    useful, of_one = (
        _useful_bytes(group_specs(caches), sequences, max_model_len, config.watermark)
        for sequences in (config.max_num_seqs, 1)
    )
    in_order = 0
    if adapters is not None:
        keeper = AdapterCache(_in_blocks_of(adapters, group_specs(caches), form), form)
        caches, in_order = (*caches, keeper), device_bytes(keeper.matrices(mesh))
        useful, of_one = useful + adapters.adapters * _largest(keeper), of_one + _largest(keeper)

    def size(temporary_bytes: int) -> int:
        return pool_bytes(
            memory,
            requested=config.kv_cache_memory_bytes,
            memory_utilization=config.memory_utilization,
            temporary_bytes=temporary_bytes,
            adapter_bytes=in_order,
            useful_bytes=useful,
            sequence_bytes=of_one,
        )

    sizes: tuple[ProgramSize, ...] = ()
    if not memory.is_host and config.kv_cache_memory_bytes is None:
        # Temporaries do not depend on the pool's size: a pool of half the room leaves them the other half.
        programs = step_programs(
            config,
            model,
            graphdef,
            params,
            PoolSpec.plan(caches, size(0) // 2),
            mesh,
            max_model_len=max_model_len,
            rows=rows,
            kernel_impl=kernel_impl,
        )
        kept = programs.half_encoded_bytes  # may be there whichever program runs
        measured = (measure or compile_largest)(programs)
        sizes = tuple(replace(size, temporary_bytes=size.temporary_bytes + kept) for size in measured)
    temporary = max((program.temporary_bytes for program in sizes), default=0)
    spec = PoolSpec.plan(caches, size(temporary))
    return MemoryPlan(spec, device_bytes(params), in_order, useful, memory, sizes)


def compile_largest(programs: StepPrograms) -> tuple[ProgramSize, ...]:
    """Compile the programs with the largest temporaries and return their sizes."""
    encoders = {"image encoder": programs.encoder(), "image encoder, some layers": programs.encoder_part()}
    encoding = [program_size(name, lowered) for name, lowered in encoders.items() if lowered is not None]
    sampler = program_size("sampler", programs.sampler())
    sampler = replace(sampler, temporary_bytes=sampler.temporary_bytes + programs.table_bytes)
    return program_size("mixed step", programs.mixed()), sampler, *encoding


def step_programs(
    config: SizedConfig,
    model: CausalLM,
    graphdef: nnx.GraphDef,
    params: Any,
    spec: PoolSpec,
    mesh: Mesh,
    *,
    max_model_len: int,
    rows: ImageRows | None = None,
    kernel_impl: Impl | None = None,
) -> StepPrograms:
    """Return the programs of an engine with these settings and this pool; for `rows` see `image_rows`."""
    return StepPrograms(
        graphdef=graphdef,
        params=params,
        spec=spec,
        mesh=mesh,
        max_num_seqs=config.num_rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        kernel_impl=kernel_impl,
        examples=image_examples(model, rows),
        image_rows=rows,
    )


def resolve_max_model_len(asked: int | None, model_config: Any) -> int:
    """Return the most tokens of a sequence: the setting, or a default within the length of the model's training.

    Raises:
        ValueError: `asked` is above the length of the model's training, as stretched by its rotary scaling.
    """
    text = model_config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if asked is None:
        return min(DEFAULT_MAX_MODEL_LEN, limit or DEFAULT_MAX_MODEL_LEN)
    if limit is None:
        return asked
    stretched = max(limit, _stretched(text, limit))
    if asked > stretched:
        scaled = "" if stretched == limit else f", stretched to {stretched} by its rope_parameters"
        raise ValueError(f"max_model_len={asked} is above the model's max_position_embeddings={limit}{scaled}")
    return asked


def _stretched(text_config: Any, limit: int) -> int:
    """Return the number of positions after linear scaling or YaRN, as vLLM counts them.

    For Llama 3's parameters, and for those given by layer type, `limit` already includes the scaling.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    bases = {"linear": limit, "yarn": rope.get("original_max_position_embeddings")}
    base, factor = bases.get(rope.get("rope_type", "")), rope.get("factor")
    return int(base * factor) if base and factor else limit


def _in_blocks_of(adapters: AdapterGroup, specs: Sequence[GroupSpec], form: BlockSettings) -> AdapterGroup:
    """Return the group with blocks of the size of the model's smallest, so that large pages do not change."""
    smallest = min(specs, key=lambda spec: spec.layer_bytes * spec.view_layers)
    rows = smallest.layer_bytes // (LANES * form.dtype.itemsize)
    return replace(adapters, block_layers=smallest.view_layers, block_rows=rows)


def _largest(cache: AdapterCache) -> int:
    """Return the bytes of the largest adapter: the highest rank, for every matrix that can be adapted."""
    return sum(cache.most_blocks) * cache.block_bytes


def _useful_bytes(specs: list[GroupSpec], max_num_seqs: int, max_model_len: int, watermark: float) -> int:
    """Return the size of a pool in which max_num_seqs sequences never wait for memory.

    Each sequence has max_model_len tokens and the largest image.
    """
    one = 0
    layout = PoolLayout.plan(specs, _ANY_POOL)
    for group in layout.groups:
        policy, size = group.spec.policy, group.spec.block_size
        if isinstance(policy, ImageFeatures) and policy.stays:
            one += policy.peak_blocks(max_model_len, max_model_len, size) * group.block_bytes
            continue
        entries = max(math.ceil(max_model_len / size), policy.num_blocks(max_model_len, size))
        one += len(policy.placed(range(entries), size)) * group.block_bytes
    begun = layout.page_bytes * len(layout.groups)  # each group may fill its last large page only in part
    return math.ceil(one * max_num_seqs / (1 - watermark) * 1.02) + begun
