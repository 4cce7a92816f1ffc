"""From settings to a running engine: mesh, weights, pool, scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.execution import Runner, enable_compilation_cache, group_specs, make_mesh, plan_pool, platform
from jpaged.execution.sizing import pool_bytes, step_temporary_bytes
from jpaged.loading import load_model
from jpaged.memory import GroupSpec, MemoryManager
from jpaged.scheduling import Scheduler

DEFAULT_MAX_MODEL_LEN = 2048
DEFAULT_SWAP_LIMIT = 4 << 30
"""Most host memory for swapped blocks without being asked for."""


@dataclass(frozen=True)
class Built:
    """An engine and what was learnt of its model on the way."""

    engine: Engine
    model_config: Any
    tokenizer: Any


class _Shapes(TypedDict):
    """Bounds of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


class _KV(TypedDict):
    """How KV memory is laid out; see `plan_pool`."""

    block_size: int
    dtype: jnp.dtype
    shards: int


def build_engine(config: EngineConfig) -> Built:
    """Load the model, size the pool and put the engine together.

    Raises:
        ValueError: see `jpaged.LLM`.
    """
    enable_compilation_cache()
    mesh = make_mesh(config.tensor_parallel_size)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        mesh=mesh,
        tensor_parallel_size=config.tensor_parallel_size,
        stacked=platform(mesh) != "cpu",
    )
    groups, vocab_size = loaded.model.layer_groups, loaded.model.vocab_size
    max_model_len = _max_model_len(config.max_model_len, loaded.config)
    kv: _KV = {
        "block_size": config.block_size,
        "dtype": jnp.dtype(loaded.dtype),
        "shards": config.tensor_parallel_size,
    }
    shapes: _Shapes = {"max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens}
    useful = _useful_bytes(group_specs(groups, **kv), config.max_num_seqs, max_model_len, config.watermark)
    temporary = 0
    if platform(mesh) != "cpu" and config.kv_cache_memory_bytes is None:
        small = plan_pool(groups, pool_bytes=useful, **kv)
        temporary = step_temporary_bytes(
            loaded.graphdef,
            loaded.params,
            small,
            mesh,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            **shapes,
        )
    size = pool_bytes(
        mesh,
        loaded.params,
        requested=config.kv_cache_memory_bytes,
        memory_utilization=config.memory_utilization,
        temporary_bytes=temporary,
        useful_bytes=useful,
    )
    spec = plan_pool(groups, pool_bytes=size, **kv)
    runner = Runner(
        loaded.graphdef,
        loaded.params,
        spec,
        mesh,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        can_swap=config.preemption_mode != "recompute",
        deterministic=config.deterministic,
        **shapes,
    )
    memory = MemoryManager(
        spec.layout,
        watermark=config.watermark,
        prefix_caching=config.enable_prefix_caching,
        prefix_eviction=config.prefix_eviction,
        max_step_tokens=min(config.max_num_batched_tokens, config.long_prefill_token_threshold or max_model_len),
        swap_space_bytes=_swap_space_bytes(config, spec.layout.pool_bytes),
    )
    engine = Engine(
        Scheduler(
            memory,
            policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            preemption_mode=config.preemption_mode,
            **shapes,
        ),
        runner,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=loaded.tokenizer,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
    )
    return Built(engine, loaded.config, loaded.tokenizer)


def _max_model_len(asked: int | None, model_config: Any) -> int:
    limit = getattr(model_config, "max_position_embeddings", None)
    if asked is None:
        return min(DEFAULT_MAX_MODEL_LEN, limit or DEFAULT_MAX_MODEL_LEN)
    if limit is not None and asked > limit:
        raise ValueError(f"max_model_len={asked} is above the model's max_position_embeddings={limit}")
    return asked


def _swap_space_bytes(config: EngineConfig, pool_bytes: int) -> int:
    if config.preemption_mode == "recompute":
        return 0
    return min(pool_bytes, DEFAULT_SWAP_LIMIT) if config.swap_space_bytes is None else config.swap_space_bytes


def _useful_bytes(specs: list[GroupSpec], max_num_seqs: int, max_model_len: int, watermark: float) -> int:
    """Bytes with which max_num_seqs sequences of max_model_len tokens never wait for memory."""
    one = sum(math.ceil(max_model_len / s.block_size) * s.layer_bytes * s.num_layers for s in specs)
    return math.ceil(one * max_num_seqs / (1 - watermark) * 1.02)
