"""Builds a running engine from its settings: mesh, weights, pool, scheduler."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jpaged.config import EngineConfig, SizedConfig
from jpaged.distributed import Follower, Leader, join
from jpaged.engine.engine import Engine
from jpaged.engine.memory_plan import plan_memory, resolve_max_model_len
from jpaged.engine.program_folder import check_model, open_programs, with_compiled_pool
from jpaged.engine.saved_state.identity import identity_of
from jpaged.engine.sizes import check_compute_dtype, longest_sequence, pool_tokens, sized
from jpaged.engine.speculation import draft_source, make_speculation, step_costs
from jpaged.engine.tiers import host_memory, open_tiers
from jpaged.engine.whole_prompts import for_whole_prompts
from jpaged.execution import PoolSpec, Runner, StepSettings, enable_compilation_cache, make_mesh, platform
from jpaged.execution.caches.adapters import AdapterCache
from jpaged.execution.compile.cache import precompile_attention_loops
from jpaged.execution.device_memory import claim_gpu_share, device_bytes, memory_limit
from jpaged.execution.image_rows import ImageRows, image_examples, image_rows
from jpaged.execution.kv_dtype import resolve_kv_dtype
from jpaged.images import GivenLayout, image_processor_class
from jpaged.loading import LoadedModel, load_model
from jpaged.loading.lora import Adaptable, AdapterRegistry, adapter_group
from jpaged.loading.pooling_head import PoolingHead
from jpaged.memory import MemoryManager, StateCheckpoints, Tiers
from jpaged.memory.policies import VerifiedStates
from jpaged.memory.tiers import HostMemory
from jpaged.model_api import (
    AdapterGroup,
    Bfloat16Tiles,
    CausalLM,
    CrossAttentionGroup,
    ImageGroup,
    PacksImages,
    PromptEncoder,
    TakesImages,
)
from jpaged.scheduling import Scheduler
from jpaged.scheduling.speculation import Speculation, StepCosts
from jpaged.setting import refuse
from jpaged.text.images import ImageInputs
from jpaged.text.input_processor import InputProcessor
from jpaged.text.output_processor import OutputProcessor
from pallas_kernels.cpu_cores import limit_threads

logger = logging.getLogger("jpaged")
progress = logging.getLogger("jpaged.progress")

DEFAULT_SWAP_LIMIT = 4 << 30
"""Most bytes of host memory for swapped blocks where the settings give no size."""


@dataclass(frozen=True)
class ServedModel:
    """The model that an engine runs, with its settings and the makers of its requests and outputs.

    It holds no reference to the engine.
    """

    config: SizedConfig
    input_processor: InputProcessor
    output_processor: OutputProcessor
    model_config: Any
    tokenizer: Any
    dtype: Any
    model: CausalLM
    sampling: Mapping[str, Any]
    pooling: PoolingHead


@dataclass(frozen=True)
class Built:
    """A new engine and the model that it runs."""

    engine: Engine
    served: ServedModel


def build_engine(config: EngineConfig, *, collect: Path | None = None) -> Built:
    """Load the model, size the pool and put the engine together.

    In a run of several processes this returns in process 0 only; the others follow its calls until it ends.

    Args:
        collect: folder for which compiled programs are collected, see `compile_ahead`; None = they are not.

    Raises:
        ValueError: see `jpaged.LLM`.
        SystemExit: process 0 ended.
        ProcessLost: another process of the run was lost.
    """
    enable_compilation_cache()
    claim_gpu_share()
    limit_threads()
    part = join(config)
    if part is None:
        return _build(config, None, collect)
    try:
        refuse(config, "several hosts", "needs one process, not several hosts")
        if collect is not None:
            raise ValueError(f"one process compiles programs into {str(collect)!r}, not several hosts")
        return _build(config, part, None)
    except Exception as error:
        part.fail(error)
        raise


def _build(asked: EngineConfig, part: Leader | Follower | None, collect: Path | None) -> Built:
    mesh = make_mesh(asked.tensor_parallel_size, asked.data_parallel_size)
    config = with_compiled_pool(sized(asked, platform(mesh), memory_limit(mesh)), mesh)
    check_compute_dtype(config.dtype, platform(mesh), mesh.size)
    if config.compiled_programs is None:  # a folder of programs has their loops
        precompile_attention_loops(
            mesh, dtype=config.dtype, kv_cache_dtype=config.kv_cache_dtype, block_size=config.block_size
        )
    loaded = load_model(
        config.model,
        dtype=config.dtype,
        quantization=config.quantization,
        mesh=mesh,
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel=config.enable_expert_parallel,
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        classifier_from_token=config.classifier_from_token,
        revision=config.revision,
        download_dir=config.download_dir,
        generation_config=config.generation_config,
        language_model_only=config.language_model_only,
        mmproj=config.mmproj,
        # `jpaged.training` computes with arrays, whose bits a deterministic engine repeats.
        compact_tiles=Bfloat16Tiles.FLOAT32_BITS if config.deterministic else Bfloat16Tiles.FLOAT32_PRODUCT,
        longest=partial(resolve_max_model_len, config.max_model_len),
        check=partial(check_model, config),
    )
    encodes = isinstance(loaded.model, PromptEncoder)
    if isinstance(loaded.model, PromptEncoder):
        config = for_whole_prompts(config, asked, loaded.model)
    thoughts = (config.reasoning_config and config.reasoning_config.reasoning_parser) or None
    outputs = OutputProcessor(loaded.tokenizer, scored=config.cumulative_logprobs, reasoning_parser=thoughts)
    no_images = why_no_images(config, loaded.model, part is not None)
    progress.info("building the engine: its pool and its steps")
    drafting = draft_source(config, loaded)
    vocab_size, max_model_len = loaded.model.vocab_size, resolve_max_model_len(config.max_model_len, loaded.config)
    images = _image_inputs(config, loaded, no_images)
    # Only where rows follow it: opening the processor reads files and, in some families, imports transformers'.
    asks = isinstance(loaded.model, PacksImages) and loaded.model.row_layout.largest is None
    most = images.most_features if asks else None
    rows = image_rows(loaded.model, most, max_model_len=max_model_len, budget=config.max_num_batched_tokens)
    spec = plan_memory(
        config,
        loaded.model,
        loaded.graphdef,
        loaded.params,
        mesh,
        max_model_len=max_model_len,
        dtype=resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype, mesh, config.block_size),
        draft_groups=drafting.groups,
        adapters=adapters_of(config, loaded),
        rows=rows,
    ).spec
    host = host_memory(config)
    adapters = adapter_registry(config, loaded, spec, host)
    if part is not None:
        spec = spec.resized(part.smallest(spec.device_bytes))
    tiers = open_tiers(config, spec, lambda: identity_of(config, loaded.config, loaded.params, mesh, spec), host)
    try:
        runner = Runner(
            loaded.graphdef,
            loaded.params,
            spec,
            mesh,
            StepSettings(
                max_num_seqs=config.num_rows,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=max_model_len,
                vocab_size=vocab_size,
                deterministic=config.deterministic,
                verifies=config.speculative is not None,
                images=no_images is None,
                together=tokens_together(loaded.model, rows, config.max_num_batched_tokens),
                image_rows=rows,
                adapters=adapters is not None,
                scored=config.cumulative_logprobs,
                draws=not encodes,
            ),
            can_swap=config.moves_blocks,
            draft=drafting.program,
            examples=image_examples(loaded.model, rows) if no_images is None else (),
            programs=open_programs(config, loaded, spec, max_model_len, collect),
            tiers=tiers.threads,
        )
    except BaseException:
        tiers.close()
        raise
    if isinstance(part, Follower):
        part.follow(runner)
    if isinstance(part, Leader):
        part.lead(runner)
    speculation = None
    if config.speculative is not None:
        speculation = make_speculation(config.speculative, platform(mesh), drafting)
    costs = None if config.cumulative_logprobs else step_costs(platform(mesh))
    schedulers = [  # several replicas have no tiers
        make_scheduler(config, spec, max_model_len, speculation, tiers.tiers, costs)
        for _ in range(config.data_parallel_size)
    ]
    engine = Engine(schedulers, runner, max_model_len=max_model_len)
    if config.kv_cache_events is not None:
        engine.log_cache_events(config.kv_cache_events)
    inputs = InputProcessor(
        loaded.tokenizer,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=loaded.eos_token_ids,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
        images=images,
        prompt_vocab_size=_prompt_vocab_size(loaded.model),
        adapters=adapters,
        no_output=None if loaded.pooling.generates else _no_output(config, loaded.pooling),
        keeps_ends=engine.memory.keeps_states,
        reasoning=config.reasoning_config,
    )
    engine.stats_log.enabled = not config.disable_log_stats
    log_model(loaded, config)
    log_pool(engine.memory, spec, config, max_model_len)
    served = ServedModel(
        config=config,
        input_processor=inputs,
        output_processor=outputs,
        model_config=loaded.config,
        tokenizer=loaded.tokenizer,
        dtype=loaded.dtype,
        model=loaded.model,
        sampling=loaded.sampling,
        pooling=loaded.pooling,
    )
    return Built(engine, served)


def _prompt_vocab_size(model: CausalLM | PromptEncoder) -> int | None:
    if isinstance(model, PromptEncoder):
        return model.token_types * model.vocab_size
    return model.prompt_vocab_size if isinstance(model, TakesImages) else None


def _no_output(config: EngineConfig, pooling: PoolingHead) -> str:
    others = {0: "embed() and score() of pairs", 1: "embed(), classify() and score() of pairs"}
    classes = 0 if pooling.classes is None else len(pooling.classes)
    only = others.get(classes, "embed() and classify()")
    return f"{config.model} has no vocabulary's head (lm_head.weight): only {only}"


def _image_inputs(config: EngineConfig, loaded: LoadedModel, refusal: str | None) -> ImageInputs:
    """Return the object that prepares a model's images, or refuses them."""
    if not isinstance(loaded.model, TakesImages):
        return ImageInputs(refusal)
    group = loaded.model.image_group
    return ImageInputs(
        refusal,
        folder=loaded.processor or loaded.location,
        config=loaded.config,
        tokenizer=loaded.tokenizer,
        sources=config.images,
        whole=group.whole,
        padded=loaded.model.padded,
        most_together=group.most_together if isinstance(group, CrossAttentionGroup) else None,
        given=_given_layout(loaded.model, loaded.config, group),
        settings=config.mm_processor_kwargs,
        limits=config.limit_mm_per_prompt,
        longest=getattr(loaded.model, "longest_image", None),
        processor=loaded.model.image_processor if isinstance(loaded.model, PacksImages) else None,
    )


def _given_layout(model: TakesImages, config: Any, group: Any) -> GivenLayout | None:
    """Return how features that callers encoded are placed: on grids, for models with an axis for each side; in rows,
    for those whose image processor ends these; or in turn, for those that say so."""
    if getattr(model, "takes_features_in_turn", False):
        return GivenLayout(group.width, None)
    if not isinstance(group, ImageGroup) or group.axes != 3:
        if not isinstance(model, PacksImages):
            return None
        merge = image_processor_class(model.image_processor).given_merge(config)
        return None if merge is None else GivenLayout(group.width * group.levels, merge, in_rows=True)
    return GivenLayout(group.width * group.levels, config.vision_config.spatial_merge_size)


def make_scheduler(
    config: SizedConfig,
    spec: PoolSpec,
    max_model_len: int,
    speculation: Speculation | None = None,
    tiers: Tiers | None = None,
    costs: StepCosts | None = None,
) -> Scheduler:
    """Make a replica's scheduler, with the memory manager of its pool.

    Args:
        costs: of steps; None = forced tokens are drawn, as they need log-probabilities.
    """
    memory = MemoryManager(
        spec.layout,
        watermark=config.watermark,
        prefix_caching=config.enable_prefix_caching,
        prefix_eviction=config.prefix_eviction,
        max_step_tokens=min(config.max_num_batched_tokens, config.long_prefill_token_threshold or max_model_len),
        swap_space_bytes=_swap_space_bytes(config, spec),
        tiers=tiers,
        cache_salt_bytes=config.cache_salt_bytes,
    )
    return Scheduler(
        memory,
        max_num_seqs=config.max_num_seqs,
        num_rows=config.num_rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        preemption_mode=config.preemption_mode,
        speculation=speculation,
        costs=costs,
    )


def _swap_space_bytes(config: EngineConfig, spec: PoolSpec) -> int:
    if config.preemption_mode == "recompute":
        return 0
    most = spec.layout.pool_bytes
    if config.kv_offloading_size is not None:  # one bound for all blocks in host memory
        most = min(most, int(config.kv_offloading_size * (1 << 30)) // spec.shards)
    if config.swap_space_bytes is not None:
        return min(most, config.swap_space_bytes) if config.kv_offloading_size is not None else config.swap_space_bytes
    return min(most, DEFAULT_SWAP_LIMIT if config.swap_space is None else int(config.swap_space * (1 << 30)))


def adapters_of(config: EngineConfig, loaded: Adaptable) -> AdapterGroup | None:
    """Return the layer group that keeps adapters; None without enable_lora.

    Raises:
        ValueError: the model does not support adapters.
    """
    if not config.enable_lora:
        return None
    return adapter_group(loaded, rank=config.max_lora_rank, adapters=config.max_loras, in_turn=config.deterministic)


def adapter_registry(
    config: EngineConfig, loaded: LoadedModel, spec: PoolSpec, host: HostMemory
) -> AdapterRegistry | None:
    """Return the registry of adapters, with those of lora_modules read; None if the pool keeps no adapters.

    Raises:
        ValueError: an adapter of lora_modules cannot be used.
    """
    found = [cache for cache in spec.caches if isinstance(cache, AdapterCache)]
    return AdapterRegistry(loaded, found[0], config.lora_modules, host, config.max_cpu_loras) if found else None


def why_no_images(config: EngineConfig, model: CausalLM, several_processes: bool) -> str | None:
    """Return the reason why prompts cannot have images; None if they can.

    Args:
        several_processes: whether the devices belong to several processes.
    """
    if not isinstance(model, TakesImages):
        only = " with language_model_only=True" if config.language_model_only else ""
        return f"prompts are text only, as model={config.model!r}{only} takes no images"
    if several_processes:
        return "images need one process, not several hosts"
    return None


def tokens_together(model: CausalLM, rows: ImageRows | None, most: int) -> tuple[int, ...]:
    """Return the numbers of tokens that a launch of an image whose tokens see each other may have, ascending; () for a
    model without such images.

    Args:
        rows: packs images that have any size.
        most: tokens of a step.
    """
    if not isinstance(model, TakesImages) or not model.image_group.whole:
        return ()
    if rows is None:
        return (max(features for _, features in model.examples()),)
    return rows.tokens_up_to(most)


def log_model(loaded: LoadedModel, config: EngineConfig) -> None:
    """Log the loaded model and its default sampling; warn if it has no tokenizer."""
    logger.info(
        "%s: %s from %s; dtype %s, quantization %s, %s bytes of weights on each of %d %s device(s)",
        loaded.name,
        type(loaded.model).__name__,
        loaded.location,
        loaded.dtype,
        config.quantization,
        f"{device_bytes(loaded.params):,}",
        loaded.mesh.size,
        platform(loaded.mesh),
    )
    logger.info("%s: generations end with tokens %s", loaded.name, list(loaded.eos_token_ids))
    if loaded.sampling:
        logger.info(
            "%s: generation_config=%r: requests without SamplingParams get %s; generation_config='vllm' ignores them",
            loaded.name,
            config.generation_config,
            dict(loaded.sampling),
        )
    if loaded.tokenizer is None:
        _warn(
            f"{loaded.location} has no tokenizer: prompts must be token ids, and outputs have no text; "
            "tokenizer= takes another model's"
        )


def log_pool(memory: MemoryManager, spec: PoolSpec, config: SizedConfig, max_model_len: int) -> None:
    """Log the pool's size and capacity; warn if it cannot hold a sequence of max_model_len tokens."""
    if not spec.caches:
        logger.info(
            "no KV is kept: each prompt is computed in one step; max_model_len=%d, max_num_seqs=%d, "
            "max_num_batched_tokens=%d",
            max_model_len,
            config.max_num_seqs,
            config.max_num_batched_tokens,
        )
        return
    longest = longest_sequence(memory, max_model_len)
    tokens = pool_tokens(memory, max(longest, 1))
    logger.info(
        "KV pool of %s bytes a device (%d large pages of %s bytes, %s): %d tokens, that is %.1f sequences of %d; "
        "max_model_len=%d, max_num_seqs=%d, max_num_batched_tokens=%d, block_size=%d",
        f"{spec.device_bytes:,}",
        spec.layout.num_pages,
        f"{spec.layout.page_bytes:,}",
        spec.dtype,
        tokens,
        tokens / max(longest, 1),
        longest,
        max_model_len,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.block_size,
    )
    states = [group.spec for group in spec.layout.groups if isinstance(group.spec.policy, StateCheckpoints)]
    for group in states:
        logger.info(
            "layer group %r: a state of %s bytes a sequence; checkpoints every %d tokens, inside prompts %d, and where "
            "shared prompts end",
            group.name,
            f"{group.real_bytes:,}",
            config.state_interval,
            group.policy.entries_apart(group.block_size) * group.block_size,
        )
    for group in (group.spec for group in spec.layout.groups):
        if isinstance(group.policy, VerifiedStates):
            logger.info("layer group %r: %d more states a sequence, for drafts", group.name, group.policy.slots)
    if longest < max_model_len:
        _warn(
            f"the KV pool of {spec.device_bytes:,} bytes a device holds a sequence of at most {longest} tokens, prompt "
            f"and output, which is below max_model_len={max_model_len}: longer requests are refused. Raise "
            f"kv_cache_memory_bytes or memory_utilization, or set max_model_len={max(longest, 1)}"
        )


def _warn(message: str) -> None:
    """Warn by `warnings`, as the user may have no log; `logging.captureWarnings` sends warnings to the log."""
    warnings.warn(message, UserWarning, stacklevel=2)
