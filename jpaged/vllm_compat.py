"""Names of vLLM: settings, parameters, attributes and imports that are taken, translated, or refused with a way out.

docs/from_vllm.md compares the two in full; here are the names that people type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from os.path import expanduser, realpath
from pathlib import Path
from typing import Any

from jpaged.setting import Setting, settings_of
from jpaged.speculative import MTP, WAYS, Assistant, DFlash, DraftModel, Eagle3, NGram, Speculative

_DRAFTS = "speculative_config"
"""vLLM's name of the setting `speculative`, whose value has another form there."""

_ALWAYS: Mapping[str, tuple[Any, str]] = {
    "enable_chunked_prefill": (True, "long prompts always run in chunks: a step holds at most max_num_batched_tokens"),
    "trust_remote_code": (False, "no code of a model's repository is run; a package adds a model family, see README"),
}
"""What the engine always does: the only value that can be asked for, and why."""

_CLUSTER = "give tensor_parallel_size and data_parallel_size; over hosts call jax.distributed.initialize() first"
_EXPERTS = "enable_expert_parallel spreads whole experts over the devices; they are not moved afterwards"
_COMPILER = "XLA compiles every shape once: call warmup(), or give enforce_eager=True to compile nothing ahead"
_KERNELS = "kernels are chosen by the devices"
_CONFIG = "the model's config.json is taken as it is: change a copy of the model's folder"
_FORMAT = "the format is known from the files: safetensors, GGUF, or a checkpoint saved by `jpaged convert`"
_SPECULATION = (
    f"give speculative=, which is one of jpaged's {', '.join(way.__name__ for way in WAYS)}, or speculative_config"
)
_TRANSFER = (
    "KV is not moved between engines; preemption_mode='swap' with swap_space moves it to host memory, disk_folder with "
    "disk_space to a local disk"
)
_GRAMMARS = "structured outputs run on llguidance: give SamplingParams(structured_outputs=...)"
_POOLING = "every model generates, and LLM.embed(), classify() and score() say how by PoolingParams"
_TOKENIZER = "give tokenizer= a folder with that tokenizer"
_STATE = "recurrent layers keep a state in the model's own dtype, a block each state_checkpoint_interval tokens"
_SERVER = "it is a setting of a server, not of the engine"
_SCHEDULER = "scheduling_policy, max_num_seqs and max_num_batched_tokens steer the scheduler"
_POOL = "kv_cache_memory_bytes or memory_utilization sets the size of the pool"
_GENERATION = "pass SamplingParams, or give generation_config= a folder with your generation_config.json"
_LORA = "adapters have the settings enable_lora, max_loras, max_lora_rank and lora_modules, and the model's dtype"
_IMAGES = "images are prepared as the checkpoint says, and come in multi_modal_data or as image_url parts of messages"

_INSTEAD: Mapping[str, str] = {
    "allowed_local_media_path": "give images=jpaged.ImageSources(folders=[...])",
    "allowed_media_domains": "give images=jpaged.ImageSources(hosts=[...])",
    "async_scheduling": "the engine always dispatches a step before it reads the results of the one before",
    "attention_backend": _KERNELS,
    "calculate_kv_scales": "kv_cache_dtype='int8' stores scales with the KV; 'fp8' needs none",
    "compilation_config": _COMPILER,
    "convert": _POOLING,
    "cpu_offload_gb": "weights stay on the devices: quantization or tensor_parallel_size makes them fit",
    "device": "JAX_PLATFORMS=cpu, cuda or tpu in the environment chooses the devices",
    "disable_custom_all_reduce": "XLA chooses the collectives",
    "disable_log_requests": "requests are not logged",
    "disable_mm_preprocessor_cache": _IMAGES,
    "disable_sliding_window": "windows are part of the model: their layers keep no more than the window",
    "distributed_executor_backend": _CLUSTER,
    "enable_eplb": _EXPERTS,
    "enable_prompt_embeds": "prompts are text or token ids, not embeddings",
    "enable_sleep_mode": "LLM.sleep() and wake_up() need no setting",
    "fully_sharded_loras": _LORA,
    "guided_decoding_backend": _GRAMMARS,
    "hf_overrides": f"{_CONFIG}; classifier_from_token=('no', 'yes') is a setting, for Qwen3-Reranker",
    "hf_token": "HF_TOKEN in the environment, or `hf auth login`, tells the hub who you are",
    "kv_transfer_config": _TRANSFER,
    "limit_mm_per_prompt": "give images=jpaged.ImageSources(max_images=...), or language_model_only=True for none",
    "load_format": _FORMAT,
    "logits_processors": "SamplingParams has logit_bias, allowed_token_ids, bad_words and structured_outputs",
    "logprobs_mode": "log-probabilities are the model's own, before temperature and edits ('raw_logprobs')",
    "lora_dtype": _LORA,
    "mamba_ssm_cache_dtype": _STATE,
    "max_cpu_loras": _LORA,
    "max_seq_len_to_capture": _COMPILER,
    "mm_processor_cache_gb": _IMAGES,
    "mm_processor_kwargs": _IMAGES,
    "model_impl": "a package adds a model family with an entry point in the group 'jpaged.models'",
    "num_gpu_blocks_override": _POOL,
    "num_scheduler_steps": _SCHEDULER,
    "num_speculative_tokens": _SPECULATION,
    "override_generation_config": _GENERATION,
    "override_pooler_config": _POOLING,
    "pipeline_parallel_size": _CLUSTER,
    "pooler_config": _POOLING,
    "reasoning_parser": _SERVER,
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "runner": _POOLING,
    "served_model_name": _SERVER,
    "skip_tokenizer_init": "a model without a tokenizer takes and gives token ids; detokenize=False makes no text",
    "speculative_model": _SPECULATION,
    "structured_outputs_config": _GRAMMARS,
    "task": _POOLING,
    "tokenizer_mode": "the tokenizer is the fast one of the model's folder",
    "tokenizer_revision": _TOKENIZER,
    "use_v2_block_manager": "blocks are allocated in one way",
}
"""Settings of vLLM that are refused: what to use here."""

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
"""Values of such settings, next to None, that ask for the behaviour that jpaged has anyway."""

_PROMPTS_IN_LOG = "the log has a line for each request, with its prompt and output only with --log-prompts"

_FLAGS: Mapping[str, str] = {
    "allowed_origins": "give --cors-origin for each origin",
    "disable_log_requests": _PROMPTS_IN_LOG,
    "disable_uvicorn_access_log": "--log-level warning leaves the lines of requests out",
    "enable_auto_tool_choice": "--tool-parser is enough: the model chooses unless tool_choice says otherwise",
    "enable_log_requests": _PROMPTS_IN_LOG,
    "enforce_eager": "--no-warmup compiles each shape at its first use",
    "i": "run-batch takes IN and OUT without flags",
    "input_file": "run-batch takes IN and OUT without flags",
    "tool_call_parser": "give --tool-parser",
    "uvicorn_log_level": "give --log-level",
}
"""Flags of `vllm serve` and `vllm run-batch` that ours lack and that are no settings of an engine, or mean another
thing on a server."""

_ATTRIBUTES: Mapping[str, str] = {
    "apply_model": "the weights are LLM.params, the model's description LLM.model_config",
    "collective_rpc": "one process drives all its devices, so there are no workers to call",
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
"""Names of vLLM's LLM that ours lacks, and what to use instead."""


def engine_settings(settings: Mapping[str, Any], config: type[Any], model: Any = None) -> dict[str, Any]:
    """Translate the settings that a user gave, under our names or vLLM's, to fields of `config`.

    Args:
        config: `EngineConfig`, whose fields are the known settings.
        model: the engine's model; None = it is not known.

    Raises:
        ValueError: two names of one setting are given, or a setting of vLLM asks for what the engine does not do; the
            message says what to use here.
        TypeError: a name is unknown; the message says which known ones are close.
    """
    known = [field.name for field in fields(config) if field.name != "model"]
    described = settings_of(config)
    names = aliases(config)
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None and (name == "enable_chunked_prefill" or _none_is_default(described.get(name))):
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
                found["speculative"] = speculative_of(value, model)
        elif name == "speculative" and value is None:
            continue
        elif name in names or name in known:
            plain = names.get(name, name)
            if plain in found:
                both = sorted({plain, *(alias for alias, one in names.items() if one == plain)})
                raise ValueError(f"{' and '.join(both)} are one setting: give one of them")
            check = described[plain].check if name in names else None
            found[plain] = check(name, value) if check is not None else value
        else:
            if name == "max_waiting_requests":
                raise TypeError(f"max_waiting_requests={value!r} is AsyncLLM's: an LLM has no other callers to bound")
            raise TypeError(f"{name}={value!r} is no setting of LLM{_close(name, [*known, *names, *_ALWAYS, _DRAFTS])}")
    _choose_preemption(found)
    return found


def missing_attribute(owner: str, name: str) -> str:
    """Say why a public class has no such attribute and, where vLLM's has it, what to use instead."""
    instead = f": {_ATTRIBUTES[name]}" if name in _ATTRIBUTES else ""
    return f"{owner!r} object has no attribute {name!r}{instead}"


def missing_flag(flag: str, config: type[Any]) -> str | None:
    """Say what to use in place of a flag of vLLM's command line, or of a setting that has no flag; None = unknown.

    Args:
        flag: as typed, such as ``--tool-call-parser``.
        config: `EngineConfig`.
    """
    name = flag.lstrip("-").removeprefix("no-").replace("-", "_")
    if (reason := _FLAGS.get(name) or _INSTEAD.get(name)) is not None:
        return reason
    if name in _ALWAYS:
        return _ALWAYS[name][1]
    if name in settings_of(config) or name in aliases(config):
        return f"{name} is a setting of LLM and AsyncLLM that this command has no flag for"
    return None


def _choose_preemption(settings: dict[str, Any]) -> None:
    """Interpret swap_space without a preemption mode as vLLM does: 0 is none, else swap where it pays."""
    if settings.get("swap_space") is None or "preemption_mode" in settings:
        return
    if settings["swap_space"] == 0 and not isinstance(settings["swap_space"], bool):
        del settings["swap_space"]
    elif settings.get("data_parallel_size", 1) == 1:
        settings["preemption_mode"] = "auto"
    else:
        raise ValueError(f"swap_space={settings['swap_space']!r} needs data_parallel_size=1")


def aliases(config: type[Any]) -> dict[str, str]:
    """Return vLLM's name of each setting that has another one here, with ours; the two exclude each other."""
    return {each.vllm: name for name, each in settings_of(config).items() if each.vllm is not None}


def _none_is_default(described: Setting | None) -> bool:
    return described is not None and described.none_is_default


def _close(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, 3)
    return f"; did you mean {' or '.join(close)}?" if close else ": see jpaged.config.EngineConfig for all"


_NGRAM = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_DRAFT_MODEL = ("method", "model", "num_speculative_tokens")
_METHODS = {"ngram": _NGRAM} | dict.fromkeys(("draft_model", "mtp", "eagle3", "dflash", "gemma4_mtp"), _DRAFT_MODEL)
"""Each method's keys."""
_OF_FOLDER = {"draft_model": DraftModel, "eagle3": Eagle3, "dflash": DFlash, "mtp": Assistant, "gemma4_mtp": Assistant}
"""Methods whose ``model`` is a folder -> the settings that they stand for."""


def speculative_of(config: Any, model: Any = None) -> Speculative:
    """Return the setting `speculative` that stands for a `speculative_config`.

    ``{"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": m, "prompt_lookup_min": n}`` is
    ``NGram(k, longest=m, shortest=n)``; of the two lookups one that is missing is the other, and both are 5.
    ``{"model": folder, "num_speculative_tokens": k}`` is ``DraftModel(folder, tokens=k)``.
    ``{"method": "mtp", "num_speculative_tokens": k}`` is ``MTP(k)``, and with ``"eagle3"`` and a ``model`` it is
    ``Eagle3(folder, tokens=k)``, with ``"dflash"`` ``DFlash(folder, tokens=k)``. With ``"mtp"`` or ``"gemma4_mtp"``
    and a ``model`` it is ``Assistant(folder, tokens=k)``; ``"mtp"`` with the engine's own model is ``MTP(k)`` too.

    Args:
        model: the engine's model; None = it is not known.

    Raises:
        ValueError: it is no mapping, a key is missing, unknown or out of range, or the method is another.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"speculative_config={config!r} must be a mapping")
    method = config.get("method")
    if method is None:
        method = "ngram" if config.get("model") in ("ngram", "[ngram]") else "draft_model"
    if method not in _METHODS:
        raise ValueError(
            f"speculative_config: method={method!r} is not one of {', '.join(_METHODS)}; "
            "speculative=jpaged.Layers(n) drafts with the model's own first layers"
        )
    known = _METHODS[method]
    for key, value in config.items():
        if key not in known:
            raise ValueError(
                f"speculative_config: {key}={value!r} is no setting of method {method!r} here: {', '.join(known)}"
            )
    if config.get("num_speculative_tokens") is None:
        raise ValueError("speculative_config: num_speculative_tokens is missing, the most drafts of a step")
    tokens = config["num_speculative_tokens"]
    try:
        if method == "ngram":
            longest, shortest = config.get("prompt_lookup_max"), config.get("prompt_lookup_min")
            longest = longest if longest is not None else shortest if shortest is not None else 5
            return NGram(tokens, longest=longest, shortest=longest if shortest is None else shortest)
        drafter = config.get("model")
        if method == "mtp" and (drafter is None or _are_one(drafter, model)):
            return MTP(tokens)
        if drafter is None:
            raise ValueError("model is missing, the folder of the model that drafts")
        return _OF_FOLDER[method](drafter, tokens=tokens)
    except ValueError as error:
        raise ValueError(f"speculative_config={dict(config)}: {error}") from error


def _are_one(model: Any, other: Any) -> bool:
    """Tell whether two names of models are of the same folder, file or hub id."""
    if not (isinstance(model, str | Path) and isinstance(other, str | Path)):
        return False
    return realpath(expanduser(model)) == realpath(expanduser(other))


_BEAMS = "call beam_search() with BeamSearchParams"
_LOGITS = "logit_bias, allowed_token_ids, bad_words and structured_outputs change what can be drawn"
_STRUCTURED = "give structured_outputs=StructuredOutputsParams(...), with the same arguments"

_SAMPLING_PARAMETERS: Mapping[str, str] = {
    "best_of": "give n, and choose among the outputs by cumulative_logprob",
    "early_stopping": _BEAMS,
    "extra_args": "there are no extensions that would read them",
    "flat_logprobs": "log-probabilities come as a list of mappings",
    "guided_decoding": _STRUCTURED,
    "length_penalty": _BEAMS,
    "logits_processors": _LOGITS,
    "skip_reading_prefix_cache": "a cache_salt in the prompt keeps requests apart",
    "use_beam_search": _BEAMS,
}

_SHAPE_PARAMETERS: Mapping[str, str] = {
    "backend": "llguidance follows all shapes",
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
    "disable_fallback": "there is one backend",
    "structural_tag": "give grammar=, which can mix free text and JSON",
    "whitespace_pattern": "disable_any_whitespace=True allows none",
}

_HEAD = "classify() and score() apply what the checkpoint asks for, and classify()'s outputs have the logits"

_POOLING_PARAMETERS: Mapping[str, str] = {
    "activation": _HEAD,
    "extra_kwargs": "there are no extensions that would read them",
    "returned_token_ids": "there are no rewards of single tokens",
    "softmax": _HEAD,
    "step_tag_id": "there are no rewards of single tokens",
    "task": "call embed(), classify() or score()",
    "truncate_prompt_tokens": "give embed() tokenization_kwargs={'truncation': True, 'max_length': ...}",
    "use_activation": f"embed() has normalize; {_HEAD}",
}

PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "SamplingParams": _SAMPLING_PARAMETERS,
    "StructuredOutputsParams": _SHAPE_PARAMETERS,
    "PoolingParams": _POOLING_PARAMETERS,
}
"""Parameters of vLLM's classes that ours lack, by the class."""

_IMPORTS: Mapping[str, str] = {
    "AsyncEngineArgs": "give the settings to AsyncLLM(...)",
    "AsyncLLMEngine": "use AsyncLLM",
    "EngineArgs": "give the settings to LLM(...)",
    "GuidedDecodingParams": "use StructuredOutputsParams, with the same arguments, as "
    "SamplingParams(structured_outputs=...)",
    "LLMEngine": "use LLM, or AsyncLLM to add and abort requests while others run",
}

_PROMPT_KEYS: Mapping[str, str] = {
    "encoder_prompt": "models with an encoder are not supported",
    "mm_processor_kwargs": _IMAGES,
    "multi_modal_uuids": _IMAGES,
    "prompt_embeds": "prompts are text or token ids, not embeddings",
}


def refuse_parameters(owner: str, names: Iterable[str]) -> None:
    """Refuse parameters of one of vLLM's classes that ours of the same name does not have.

    Args:
        owner: one of `PARAMETERS`.

    Raises:
        TypeError: one of the names is such a parameter; the message says what to use here.
    """
    for name in names:
        if name in PARAMETERS[owner]:
            raise TypeError(f"{name} is a parameter of vLLM that {owner} has not: {PARAMETERS[owner][name]}")


def refuse_import(module: str, name: str) -> None:
    """Refuse a name that vLLM's module has and the one called `module` has not.

    Raises:
        ImportError: it is such a name; the message says what to use here.
    """
    if name in _IMPORTS:
        raise ImportError(f"{module} has no {name}, which vLLM has: {_IMPORTS[name]}", name=module)


def check_prompt_keys(prompt: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that a prompt has no other keys than `known`, and vLLM's other ones only with nothing in them.

    Raises:
        ValueError: it has.
    """
    unknown = [key for key in prompt if key not in known and key not in _PROMPT_KEYS]
    if unknown:
        raise ValueError(f"a prompt may have {', '.join(map(repr, known[:-1]))} and {known[-1]!r}, not {unknown}")
    for key, reason in _PROMPT_KEYS.items():
        value = prompt.get(key)
        if value is not None and not (isinstance(value, Mapping) and not value):
            raise ValueError(f"a prompt has {key!r}: {reason}")
