"""From settings to a running engine: mesh, weights, pool, scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

from jpaged.config import EngineConfig
from jpaged.distributed import Follower, Leader, join
from jpaged.engine import Engine
from jpaged.execution import PoolSpec, Runner, enable_compilation_cache, make_mesh, plan_pool, platform
from jpaged.execution.one_byte import resolve_kv_dtype, rows_tile
from jpaged.loading import load_model
from jpaged.loading.placement import layers_are_stacked
from jpaged.memory import MemoryManager
from jpaged.memory_plan import plan_memory, resolve_max_model_len
from jpaged.scheduling import Scheduler

DEFAULT_SWAP_LIMIT = 4 << 30
"""Most host memory for swapped blocks without being asked for."""


@dataclass(frozen=True)
class Built:
    """An engine and what was learnt of its model on the way."""

    engine: Engine
    model_config: Any
    tokenizer: Any
    dtype: Any


class _Shapes(TypedDict):
    """Bounds of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


def build_engine(config: EngineConfig) -> Built:
    """Load the model, size the pool and put the engine together.

    In a run of several processes this returns in process 0; the others do what it says until it ends.

    Raises:
        ValueError: see `jpaged.LLM`.
        SystemExit: process 0 ended.
        ProcessLost: a process is gone.
    """
    enable_compilation_cache()
    part = join(config)
    if part is not None and config.kv_budget is not None:
        raise ValueError("kv_budget needs one process")
    if part is None:
        return _build(config, None)
    try:
        return _build(config, part)
    except Exception as error:
        part.fail(error)
        raise


def _build(config: EngineConfig, part: Leader | Follower | None) -> Built:
    mesh = make_mesh(config.tensor_parallel_size, config.data_parallel_size)
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        quantization=config.quantization,
        mesh=mesh,
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel=config.enable_expert_parallel,
        stacked=layers_are_stacked(platform(mesh)),
    )
    vocab_size, max_model_len = loaded.model.vocab_size, resolve_max_model_len(config.max_model_len, loaded.config)
    shapes: _Shapes = {"max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens}
    spec = plan_memory(
        config,
        loaded.model,
        loaded.graphdef,
        loaded.params,
        mesh,
        max_model_len=max_model_len,
        dtype=resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype, mesh, config.block_size),
    ).spec
    if part is not None:
        agreed = part.smallest(spec.device_bytes)
        spec = plan_pool(
            spec.groups,
            block_size=config.block_size,
            dtype=spec.dtype,
            shards=spec.shards,
            pool_bytes=agreed,
            tile=rows_tile(mesh),
        )
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
    if isinstance(part, Follower):
        part.follow(runner)
    if isinstance(part, Leader):
        part.lead(runner)
    engine = Engine(
        [_scheduler(config, spec, max_model_len) for _ in range(config.data_parallel_size)],
        runner,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=loaded.tokenizer,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
    )
    return Built(engine, loaded.config, loaded.tokenizer, loaded.dtype)


def _scheduler(config: EngineConfig, spec: PoolSpec, max_model_len: int) -> Scheduler:
    """A replica's, with the memory of its pool."""
    memory = MemoryManager(
        spec.layout,
        watermark=config.watermark,
        prefix_caching=config.enable_prefix_caching,
        prefix_eviction=config.prefix_eviction,
        max_step_tokens=min(config.max_num_batched_tokens, config.long_prefill_token_threshold or max_model_len),
        swap_space_bytes=_swap_space_bytes(config, spec.layout.pool_bytes),
    )
    return Scheduler(
        memory,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        preemption_mode=config.preemption_mode,
        prompt_tail=0 if config.kv_budget is None else config.kv_budget.window,
    )


def _swap_space_bytes(config: EngineConfig, pool_bytes: int) -> int:
    if config.preemption_mode == "recompute":
        return 0
    return min(pool_bytes, DEFAULT_SWAP_LIMIT) if config.swap_space_bytes is None else config.swap_space_bytes
