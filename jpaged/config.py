"""The engine's settings, checked when they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jpaged.config_checks import MAX_LORA_RANK, MAX_LORAS, check_together
from jpaged.images.settings import ImageSources
from jpaged.model_api import LayerGroup
from jpaged.pyramid_kv import PyramidKV
from jpaged.speculative import Speculative
from jpaged.validation import boolean, integer, number, one_of

DTYPES = ("auto", "float32", "bfloat16", "float16")
STATE_INTERVAL = 512
"""Tokens between the checkpoints of recurrent layers where nothing else is asked for."""
_SPELLINGS = {"dtype": {"half": "float16", "float": "float32"}, "kv_cache_dtype": {"fp8_e4m3": "fp8"}}
"""Other names for a setting's value; `EngineConfig` holds the plain one."""
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8", "fp8")
QUANTIZATIONS = ("int8", "int4", "fp8", "gguf")
PREFIX_EVICTIONS = ("lru", "aligned", "predicted")
PREEMPTION_MODES = ("recompute", "swap", "auto")
SCHEDULING_POLICIES = ("fcfs", "priority")
_CHOICES = {
    "dtype": DTYPES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "prefix_eviction": PREFIX_EVICTIONS,
    "preemption_mode": PREEMPTION_MODES,
    "scheduling_policy": SCHEDULING_POLICIES,
}
_INTEGERS = {  # name: least
    "block_size": 1,
    "state_checkpoint_interval": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "max_model_len": 1,
    "kv_cache_memory_bytes": 1,
    "swap_space_bytes": 1,
    "disk_break_even": 1,
    "seed": 0,
    "long_prefill_token_threshold": 0,
    "max_logprobs": -1,
    "max_loras": 1,
    "max_lora_rank": 1,
}
SIZES = ("block_size", "max_num_seqs", "max_num_batched_tokens")
"""Settings whose default follows the device, see `SizedConfig`."""
_OPTIONAL = (
    *SIZES,
    "max_model_len",
    "state_checkpoint_interval",
    "kv_cache_memory_bytes",
    "swap_space_bytes",
    "disk_break_even",
)
_FLAGS = (
    "enable_prefix_caching",
    "enable_expert_parallel",
    "enforce_eager",
    "background_compilation",
    "disable_log_stats",
    "cumulative_logprobs",
    "deterministic",
    "enable_lora",
)
_MODEL_FLAGS = ("language_model_only",)
_PATHS = ("tokenizer", "revision", "download_dir", "generation_config", "compiled_programs", "disk_folder")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; `LLM` takes the same names.

    Attributes:
        model: alias, hub id, Hugging Face folder, ``.gguf`` file or saved checkpoint.
        tokenizer: source of another tokenizer, in the same forms as `model`; None = the model's own.
        revision: branch, tag or commit of a hub id; None = its main branch.
        download_dir: folder for models from the hub and the demo model; None = their usual cache folders.
        generation_config: source of the generation_config.json that gives the default sampling: "auto" = the model's,
            "vllm" = nobody's, or a folder. End-of-sequence tokens come from the model's file, also for "vllm", or from
            the folder's.
        dtype: dtype of activations, of weights that are not quantised, and of KV where kv_cache_dtype is "auto".
            "auto": float32 on CPU, the checkpoint's elsewhere, but float16 in place of bfloat16 on GPUs below compute
            capability 8.0, which have none, and bfloat16 in place of float16 on TPUs. "half" and "float" are float16
            and float32. Only GPUs take float16. One CPU with Numba that computes in float32 holds the matrices of a
            bfloat16 checkpoint as they are, in half of the memory, and multiplies them in float32, and others in panels
            of columns; once `LLM.params` are asked for they are arrays of float32. On a CPU "bfloat16" means the
            matrices, what they multiply, and KV; sums, norms and all else between two products are float32. It takes
            Numba and one device.
        quantization: form of the weight matrices: None = dtype, or the form in which a quantised checkpoint
            was saved. "int8", "fp8": a scale for each output, or for each row of the vocabulary's tables. "int4": a
            scale and a minimum for 32 values, with int8 tables. "gguf": the blocks of a quantised GGUF file as they
            are.
        kv_cache_dtype: form of the KV: "auto" = dtype; "bfloat16" takes half of float32, beside any dtype
            on a CPU and beside bfloat16 elsewhere; "fp8" or "fp8_e4m3" = float8_e4m3fn without scales; "int8" with a
            scale for every 64 lanes of a token's K and V. On TPUs int8 takes a block_size of 32, 64 or 128.
        max_model_len: most tokens (prompt + output) of a sequence; None = 2048, or what the model was trained
            for if that is less. No more than that, or than what linear or YaRN scaling in the model's config makes of
            it.
        block_size: number of tokens in a block; a multiple of 8. None = 128 on TPUs, whose reads are that wide, and
            16 elsewhere.
        state_checkpoint_interval: tokens from one kept state of a model's recurrent layers to the next, a multiple of
            block_size: prompts that begin alike can go on from there, and from where a prompt that recent requests
            shared ended. None = 512, or the next multiple of block_size, and up to four times as many inside a prompt
            where a state takes more than the KV of the tokens between. Models without such layers ignore it.
        max_num_seqs: most sequences that run at once; None = by the device and its memory, from 64 on a CPU to 256, and
            no more than max_num_batched_tokens. `jpaged.engine.default_sizes` has the table.
        max_num_batched_tokens: most tokens of a step; None = by the device and its memory, from 512 on a CPU to 8192,
            and no fewer than max_num_seqs.
        kv_cache_memory_bytes: size of the pool on each device; None = what memory_utilization leaves, on CPU at most an
            eighth of the free memory, rounded down to a power of two or one and a half times one, and 4 GiB. A CPU's
            pool takes memory as it fills.
        memory_utilization: share of a device's memory that weights, temporaries and pool may take; of a GPU, share of
            the 95 % that JAX takes, or of what XLA_CLIENT_MEM_FRACTION says.
        tensor_parallel_size: number of devices over which heads, MLP columns and vocabulary are spread.
        enable_expert_parallel: whether whole experts are spread over those devices, instead of each expert's columns.
        data_parallel_size: number of replicas of the model, each with a pool and a batch of its own on
            tensor_parallel_size devices; one program runs them all. Limits, like max_num_seqs, hold for each replica.
        preemption_mode: way by which a preempted request comes back: "recompute"; "swap", by host memory; or "auto",
            which swaps requests of several sequences. Where the swap space is full a request is recomputed.
        swap_space_bytes: host memory for swapped blocks, for each device; at most the pool; None = as large as the
            pool, but at most 4 GiB.
        swap_space: swap_space_bytes in GiB, which is vLLM's setting: no more than the pool is taken. Where `LLM` gets
            it without a preemption_mode, that is "auto".
        disk_folder: folder of a local disk in which cached blocks that the pool loses are kept until the engine is
            closed; None = they are lost. They are read again, ahead of the step that needs them, where that was
            measured to be faster than computing their tokens. It needs enable_prefix_caching, and excludes replicas
            and several hosts.
        disk_space: GiB of that disk to take; None = 8.
        disk_break_even: fewest tokens that are read from disk rather than computed; None = what is measured says.
        scheduling_policy: "fcfs" serves in order of arrival; "priority" the lowest `priority` value first.
        long_prefill_token_threshold: most tokens of one prompt in one step; 0 = as many as the budget has.
        enable_prefix_caching: whether the KV of full blocks is kept for later prompts that begin alike.
        prefix_eviction: order in which cached blocks are lost, see `jpaged.memory.MemoryManager`: "lru", "aligned", or
            "predicted", which also protects prefixes that recent prompts shared.
        kv_budget: a `jpaged.PyramidKV`, by which layers drop most of a prompt's KV once it is computed; None = they
            keep all. It needs a model of full attention, and excludes prefix caching, int8 KV, replicas and
            deterministic.
        speculative: how drafts of the next tokens are made, of which a step verifies several: a `jpaged.NGram`,
            `jpaged.Layers` or `jpaged.DraftModel`; None = no drafts. It changes no token. Requests with beams go
            without. A sequence holds a state of each recurrent layer for each draft then, and one more. It excludes
            kv_budget, replicas and several hosts.
        watermark: share of the pool kept free at admission, so that running sequences can grow.
        max_logprobs: most tokens that a request's `logprobs` may ask for; -1 = up to the whole vocabulary.
        cumulative_logprobs: whether every output has its cumulative_logprob. By default it is None, as vLLM's is, where
            a request asks for no `logprobs` and has no beams, and steps whose sequences all take their most likely
            token need no logits where one CPU with VNNI and Numba holds the vocabulary's table in float32: a copy in 8
            bits, a quarter of its memory, tells the few words that may be the most likely one, and only these are
            multiplied. The tokens are the same.
        seed: seed from which the seeds of requests that bring none are drawn.
        enforce_eager: whether nothing is compiled ahead: `LLM.warmup` does nothing then, and each shape is compiled
            when a step first has it.
        background_compilation: whether only what first requests need is compiled at the start, and all other shapes in
            a thread while the engine runs. A step whose shape is not compiled yet runs in a larger one that is, which
            changes log-probabilities in their last bits. `jpaged serve` asks for it. It excludes enforce_eager and
            several hosts.
        disable_log_stats: whether the log "jpaged" has no lines about throughput while requests run.
        compiled_programs: folder that `jpaged compile` wrote, from which programs are loaded instead of traced and
            compiled; None = none. It has to be of this model, these settings, versions and machine, and also sets the
            pool's size where kv_cache_memory_bytes does not. A folder of programs is code: take it from whom you trust.
        images: where images of prompts may come from and how large they may be: a `jpaged.ImageSources`, or a mapping
            of its fields. By default PIL images and ``data:`` URLs, of at most 50 million pixels, 16 a prompt.
        language_model_only: whether of a model that sees only the language model is loaded.
        enable_lora: whether requests may run with low-rank adapters (LoRA), which are loaded into the pool at need. It
            excludes data_parallel_size, kv_budget and several hosts.
        max_loras: most different adapters of a step; requests whose adapter would be one more wait.
        max_lora_rank: largest rank of an adapter.
        lora_modules: PEFT folders that are read at the start, by the names under which requests ask for them. They ask
            for enable_lora.
        deterministic: whether a sequence's log-probabilities are the same to the last bit however it is batched,
            chunked, preempted or served from the cache. That is slower: every token is computed by programs of one
            shape. Engines agree when they agree on max_num_seqs, max_model_len, block_size, dtype, device kind and
            count.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    download_dir: str | None = None
    generation_config: str = "auto"
    dtype: str = "auto"
    quantization: Literal["int8", "int4", "fp8", "gguf"] | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "int8", "fp8"] = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    state_checkpoint_interval: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    swap_space_bytes: int | None = None
    swap_space: float | None = None
    disk_folder: str | None = None
    disk_space: float | None = None
    disk_break_even: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    prefix_eviction: Literal["lru", "aligned", "predicted"] = "predicted"
    kv_budget: PyramidKV | None = None
    speculative: Speculative | None = None
    watermark: float = 0.01
    max_logprobs: int = 20
    cumulative_logprobs: bool = False
    seed: int = 0
    enforce_eager: bool = False
    background_compilation: bool = False
    disable_log_stats: bool = False
    compiled_programs: str | None = None
    images: ImageSources = field(default_factory=ImageSources)
    language_model_only: bool = False
    enable_lora: bool = False
    max_loras: int = MAX_LORAS
    max_lora_rank: int = MAX_LORA_RANK
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, spellings in _SPELLINGS.items():
            value = getattr(self, name)
            self._store(name, spellings.get(value, value) if isinstance(value, str) else value)
        for name, known in _CHOICES.items():
            one_of(name, getattr(self, name), known)
        if self.quantization is not None:
            one_of("quantization", self.quantization, QUANTIZATIONS)
        for name in _PATHS:
            value = getattr(self, name)
            if not (isinstance(value, str) and value.strip()) and (value is not None or name == "generation_config"):
                raise ValueError(f"{name}={value!r} must be a non-empty string")
        for name, low in _INTEGERS.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._store(name, integer(name, getattr(self, name), low=low))
        for name in _FLAGS + _MODEL_FLAGS:
            boolean(name, getattr(self, name))
        self._store(
            "memory_utilization",
            number("memory_utilization", self.memory_utilization, low=0.0, high=1.0, open_low=True),
        )
        self._store("watermark", number("watermark", self.watermark, low=0.0, high=1.0))
        if self.watermark == 1:
            raise ValueError(f"watermark={self.watermark} is outside [0, 1)")
        for name in ("swap_space", "disk_space"):
            if getattr(self, name) is not None:
                self._store(name, number(name, getattr(self, name), low=0.0, open_low=True))
        self._store("lora_modules", _folders(self.lora_modules))
        if isinstance(self.images, Mapping):
            self._store("images", ImageSources(**self.images))
        if not isinstance(self.images, ImageSources):
            raise ValueError(f"images={self.images!r} must be an ImageSources")
        if self.kv_budget is not None and not isinstance(self.kv_budget, PyramidKV):
            raise ValueError(f"kv_budget={self.kv_budget!r} must be a PyramidKV or None")
        if self.speculative is not None and not isinstance(self.speculative, Speculative):
            raise ValueError(f"speculative={self.speculative!r} must be an NGram, Layers, DraftModel or None")
        check_together(vars(self))
        for setting in (self.kv_budget, self.speculative):
            if setting is not None:
                setting.check_settings(vars(self))

    def layer_groups(self, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
        """Return a model's layer groups as these settings change them.

        Raises:
            ValueError: kv_budget does not fit the model.
        """
        return tuple(groups) if self.kv_budget is None else self.kv_budget.apply(groups)

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _folders(modules: Any) -> dict[str, str]:
    """Return `lora_modules` with paths as strings.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(modules, Mapping):
        raise ValueError(f"lora_modules={modules!r} must map names to folders")
    for name, path in modules.items():
        if not (isinstance(name, str) and name and isinstance(path, str | Path) and str(path)):
            raise ValueError(f"lora_modules={modules!r} must map names to folders")
    return {name: str(path) for name, path in modules.items()}


@dataclass(frozen=True, kw_only=True)
class SizedConfig(EngineConfig):
    """Settings of an engine whose device is known: none of `SIZES` is left open. `LLM.config` is one."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def state_interval(self) -> int:
        """Return state_checkpoint_interval or, where it is None, what that stands for."""
        return self.state_checkpoint_interval or -(-STATE_INTERVAL // self.block_size) * self.block_size
