"""Names that scripts for vLLM use: which the engine takes as they are, and what stands for the others here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from jpaged.config import EngineConfig
from jpaged.validation import number
from jpaged.vllm_requests import IMAGES, LORA
from jpaged.vllm_speculation import speculative_of

_ALIASES = {"gpu_memory_utilization": "memory_utilization"}
"""Other names for a setting of `EngineConfig`, a share of memory; the two exclude each other."""

_DRAFTS = "speculative_config"
"""vLLM's name of the setting `speculative`, whose value has another form there."""

_UNSET = (
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "max_num_batched_tokens",
    "max_num_seqs",
    "seed",
)
"""Settings for which None asks for the default."""

_ALWAYS: Mapping[str, tuple[Any, str]] = {
    "enable_chunked_prefill": (True, "long prompts always run in chunks: a step holds at most max_num_batched_tokens"),
    "trust_remote_code": (False, "no code of a model's repository is run; a package adds a model family, see README"),
}
"""What the engine always does: the only value that can be asked for, and why."""

_CLUSTER = "give tensor_parallel_size and data_parallel_size; over hosts call jax.distributed.initialize() first"
_EXPERTS = "enable_expert_parallel spreads whole experts over the devices; they are not moved afterwards"
_COMPILER = "XLA compiles every shape once: call warmup(), or give enforce_eager=True to compile nothing ahead"
_KERNELS = "kernels are chosen by the devices"
_CHUNKS = "max_num_batched_tokens and long_prefill_token_threshold say how prompts are cut"
_CONFIG = "the model's config.json is taken as it is: change a copy of the model's folder"
_FORMAT = "the format is known from the files: safetensors, GGUF, or a checkpoint saved by `jpaged convert`"
_SPECULATION = "give speculative=jpaged.NGram(...), Layers(...) or DraftModel(...), or speculative_config"
_TRANSFER = (
    "KV is not moved between engines; preemption_mode='swap' with swap_space moves it to host memory, disk_folder with "
    "disk_space to a local disk"
)
_GRAMMARS = "structured outputs run on llguidance: give SamplingParams(structured_outputs=...)"
_POOLING = "every model generates, and LLM.embed(), classify() and score() say how by PoolingParams"
_TOKENIZER = "give tokenizer= a folder with that tokenizer"
_STATE = "recurrent layers keep a state in the model's own dtype, a block each state_checkpoint_interval tokens"
_METRICS = "read LLM.stats() or LLM.get_metrics(), and the log 'jpaged'"
_PLUGINS = "the engine's parts cannot be replaced by settings"
_SERVER = "it is a setting of a server, not of the engine"
_SCHEDULER = "scheduling_policy, max_num_seqs and max_num_batched_tokens steer the scheduler"
_POOL = "kv_cache_memory_bytes or memory_utilization sets the size of the pool"
_STREAMS = "stream() and AsyncLLM.generate() yield what is new at each step"
_GENERATION = "pass SamplingParams, or give generation_config= a folder with your generation_config.json"

_INSTEAD: Mapping[str, str] = {
    "additional_config": _PLUGINS,
    "aggregate_engine_logging": _METRICS,
    "all2all_backend": _CLUSTER,
    "allowed_local_media_path": "give images=jpaged.ImageSources(folders=[...])",
    "allowed_media_domains": "give images=jpaged.ImageSources(hosts=[...])",
    "async_scheduling": "the engine always runs one step ahead of the host",
    "attention_backend": _KERNELS,
    "calculate_kv_scales": "kv_cache_dtype='int8' stores scales with the KV; 'fp8' needs none",
    "code_revision": "no code of a model's repository is run",
    "collect_detailed_traces": "jax.profiler traces the engine's steps",
    "compilation_config": _COMPILER,
    "config_format": _FORMAT,
    "convert": _POOLING,
    "cpu_offload_gb": "weights stay on the devices: quantization or tensor_parallel_size makes them fit",
    "cuda_graph_sizes": _COMPILER,
    "cudagraph_capture_sizes": _COMPILER,
    "data_parallel_address": _CLUSTER,
    "data_parallel_backend": _CLUSTER,
    "data_parallel_external_lb": _CLUSTER,
    "data_parallel_hybrid_lb": _CLUSTER,
    "data_parallel_rank": _CLUSTER,
    "data_parallel_rpc_port": _CLUSTER,
    "data_parallel_size_local": _CLUSTER,
    "data_parallel_start_rank": _CLUSTER,
    "dbo_decode_token_threshold": _SCHEDULER,
    "dbo_prefill_token_threshold": _SCHEDULER,
    "dcp_kv_cache_interleave_size": _CLUSTER,
    "decode_context_parallel_size": _CLUSTER,
    "default_mm_loras": LORA,
    "device": "JAX_PLATFORMS=cpu, cuda or tpu in the environment chooses the devices",
    "disable_cascade_attn": _KERNELS,
    "disable_chunked_mm_input": IMAGES,
    "disable_custom_all_reduce": "XLA chooses the collectives",
    "disable_hybrid_kv_cache_manager": "layers of all kinds share one pool, always",
    "disable_log_requests": "requests are not logged",
    "disable_mm_preprocessor_cache": IMAGES,
    "disable_nccl_for_dp_synchronization": _CLUSTER,
    "disable_sliding_window": "windows are part of the model: their layers keep no more than the window",
    "distributed_executor_backend": _CLUSTER,
    "ec_transfer_config": _TRANSFER,
    "enable_dbo": _SCHEDULER,
    "enable_eplb": _EXPERTS,
    "enable_log_requests": "requests are not logged",
    "enable_lora_bias": LORA,
    "enable_mm_embeds": IMAGES,
    "enable_prompt_embeds": "prompts are text or token ids, not embeddings",
    "enable_return_routed_experts": _PLUGINS,
    "enable_sleep_mode": "LLM.sleep() and wake_up() need no setting",
    "eplb_config": _EXPERTS,
    "expert_placement_strategy": _EXPERTS,
    "fully_sharded_loras": LORA,
    "guided_decoding_backend": _GRAMMARS,
    "hf_config_path": _CONFIG,
    "hf_overrides": _CONFIG,
    "hf_token": "HF_TOKEN in the environment, or `hf auth login`, tells the hub who you are",
    "ignore_patterns": _FORMAT,
    "interleave_mm_strings": IMAGES,
    "io_processor_plugin": _PLUGINS,
    "kv_cache_metrics": _METRICS,
    "kv_events_config": _TRANSFER,
    "kv_offloading_backend": _TRANSFER,
    "kv_offloading_size": _TRANSFER,
    "kv_sharing_fast_prefill": _KERNELS,
    "kv_transfer_config": _TRANSFER,
    "limit_mm_per_prompt": "give images=jpaged.ImageSources(max_images=...), or language_model_only=True for none",
    "load_format": _FORMAT,
    "logits_processor_pattern": "SamplingParams has logit_bias, allowed_token_ids, bad_words and structured_outputs",
    "logits_processors": "SamplingParams has logit_bias, allowed_token_ids, bad_words and structured_outputs",
    "logprobs_mode": "log-probabilities are the model's own, before temperature and edits ('raw_logprobs')",
    "lora_dtype": LORA,
    "mamba_block_size": _STATE,
    "mamba_cache_dtype": _STATE,
    "mamba_ssm_cache_dtype": _STATE,
    "master_addr": _CLUSTER,
    "master_port": _CLUSTER,
    "max_cpu_loras": LORA,
    "max_long_partial_prefills": _CHUNKS,
    "max_num_partial_prefills": _CHUNKS,
    "max_parallel_loading_workers": "weights are read ahead by two threads, a few tensors at a time",
    "max_seq_len_to_capture": _COMPILER,
    "media_io_kwargs": IMAGES,
    "mm_encoder_only": IMAGES,
    "mm_encoder_tp_mode": IMAGES,
    "mm_processor_cache_gb": IMAGES,
    "mm_processor_cache_type": IMAGES,
    "mm_processor_kwargs": IMAGES,
    "model_impl": "a package adds a model family with an entry point in the group 'jpaged.models'",
    "model_loader_extra_config": _FORMAT,
    "nnodes": _CLUSTER,
    "node_rank": _CLUSTER,
    "num_gpu_blocks_override": _POOL,
    "num_lookahead_slots": _SPECULATION,
    "num_redundant_experts": _EXPERTS,
    "num_scheduler_steps": _SCHEDULER,
    "num_speculative_tokens": _SPECULATION,
    "optimization_level": _COMPILER,
    "otlp_traces_endpoint": _METRICS,
    "override_generation_config": _GENERATION,
    "override_pooler_config": _POOLING,
    "pipeline_parallel_size": _CLUSTER,
    "pooler_config": _POOLING,
    "prefill_context_parallel_size": _CLUSTER,
    "prefix_caching_hash_algo": "blocks are found by digest and compared token by token, so no digest can mislead",
    "pt_load_map_location": _FORMAT,
    "ray_workers_use_nsight": "jax.profiler traces the engine's steps",
    "reasoning_parser": _SERVER,
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "runner": _POOLING,
    "safetensors_load_strategy": "safetensors are mapped into memory and read once",
    "scheduler_cls": _SCHEDULER,
    "scheduler_delay_factor": _SCHEDULER,
    "served_model_name": _SERVER,
    "show_hidden_metrics_for_version": _METRICS,
    "skip_mm_profiling": IMAGES,
    "skip_tokenizer_init": "a model without a tokenizer takes and gives token ids; detokenize=False makes no text",
    "speculative_model": _SPECULATION,
    "stream_interval": _STREAMS,
    "structured_outputs_config": _GRAMMARS,
    "task": _POOLING,
    "tokenizer_mode": "the tokenizer is the fast one of the model's folder",
    "tokenizer_pool_size": "texts are tokenised in the caller's thread",
    "tokenizer_revision": _TOKENIZER,
    "use_tqdm_on_load": "loading shows no bar; the log 'jpaged' says what is loaded",
    "use_v2_block_manager": "blocks are allocated in one way",
    "video_pruning_rate": IMAGES,
    "worker_cls": _PLUGINS,
    "worker_extension_cls": _PLUGINS,
}
"""Every other setting of vLLM's engine: what to use here."""

_SAME: Mapping[str, tuple[Any, ...]] = {
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "enable_sleep_mode": (True, False),
    "load_format": ("auto",),
    "logprobs_mode": ("raw_logprobs",),
    "model_impl": ("auto",),
    "pipeline_parallel_size": (1,),
    "runner": ("auto", "generate", "pooling"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate", "embed", "classify", "score"),
    "tokenizer_mode": ("auto",),
}
"""Values of such settings, beside None, that ask for what is done anyway."""

_ATTRIBUTES: Mapping[str, str] = {
    "apply_model": "the weights are LLM.params, the model's description LLM.model_config",
    "collective_rpc": "one process drives all its devices: there is nobody to call",
    "encode": "use LLM.embed() or LLM.classify()",
    "engine_core": "LLM.stats(), LLM.memory_report() and LLM.config tell what it does",
    "get_default_pooling_params": "PoolingParams() takes what the model's folder says",
    "llm_engine": "use LLM.config and LLM.model_config for settings, LLM.get_tokenizer(), LLM.stats() and "
    "LLM.get_metrics() for its state, and AsyncLLM to add and abort requests while others run",
    "enqueue": "AsyncLLM adds requests while others run",
    "preprocess_chat": "use LLM.chat_prompt()",
    "reward": "use LLM.classify(), whose outputs have the logits",
    "set_tokenizer": "give tokenizer= when you make the LLM",
    "start_profile": "call jax.profiler.start_trace(folder)",
    "stop_profile": "call jax.profiler.stop_trace()",
    "wait_for_completion": "LLM.generate() returns when all is done; AsyncLLM yields what comes",
}
"""What vLLM's LLM has beside what ours has: what to use here."""


def engine_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings that a user gave, under our names or vLLM's, to those of `EngineConfig`.

    Raises:
        ValueError: two names of one setting are given, or a setting of vLLM asks for what the engine does not do; the
            message says what to use here.
        TypeError: a name is unknown; the message says which known ones are close.
    """
    known = [field.name for field in fields(EngineConfig) if field.name != "model"]
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None and name in _UNSET:
            continue
        if name in _ALWAYS:
            only, reason = _ALWAYS[name]
            if value is not only:
                raise ValueError(f"{name}={value!r} must be {only}: {reason}")
        elif name in _INSTEAD:
            if value is not None and value not in _SAME.get(name, ()):
                raise ValueError(f"{name}={value!r} is a setting of vLLM that is not one here: {_INSTEAD[name]}")
        elif name == _DRAFTS:
            if value is not None and settings.get("speculative") is not None:
                raise ValueError(f"speculative and {_DRAFTS} are one setting: give one of them")
            if value is not None:
                found["speculative"] = speculative_of(value)
        elif name == "speculative" and value is None:
            continue
        elif name in _ALIASES or name in known:
            plain = _ALIASES.get(name, name)
            if plain in found:
                raise ValueError(f"{' and '.join(sorted(_names_of(plain)))} are one setting: give one of them")
            found[plain] = number(name, value, low=0.0, high=1.0, open_low=True) if name in _ALIASES else value
        else:
            if name == "max_waiting_requests":
                raise TypeError(f"max_waiting_requests={value!r} is AsyncLLM's: an LLM has no other callers to bound")
            raise TypeError(
                f"{name}={value!r} is no setting of LLM{_close(name, [*known, *_ALIASES, *_ALWAYS, _DRAFTS])}"
            )
    _choose_preemption(found)
    return found


def missing_attribute(owner: str, name: str) -> str:
    """Say why a public class has no such attribute and, where vLLM's has it, what to use instead."""
    instead = f": {_ATTRIBUTES[name]}" if name in _ATTRIBUTES else ""
    return f"{owner!r} object has no attribute {name!r}{instead}"


def _choose_preemption(settings: dict[str, Any]) -> None:
    """Where swap_space stands alone, it means what it does in vLLM: 0 is none, and more is used where it pays."""
    if settings.get("swap_space") is None or "preemption_mode" in settings:
        return
    if settings["swap_space"] == 0 and not isinstance(settings["swap_space"], bool):
        del settings["swap_space"]
    elif settings.get("data_parallel_size", 1) == 1:
        settings["preemption_mode"] = "auto"
    else:
        raise ValueError(f"swap_space={settings['swap_space']!r} needs data_parallel_size=1")


def _names_of(plain: str) -> set[str]:
    return {plain, *(alias for alias, name in _ALIASES.items() if name == plain)}


def _close(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, 3)
    return f"; did you mean {' or '.join(close)}?" if close else ": see jpaged.config.EngineConfig for all"
