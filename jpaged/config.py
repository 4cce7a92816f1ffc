"""The engine's settings, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jpaged.pyramid_kv import PyramidKV

DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
QUANTIZATIONS = ("int8", "int4", "fp8", "gguf")
PREFIX_EVICTIONS = ("lru", "aligned", "predicted")
PREEMPTION_MODES = ("recompute", "swap", "auto")
SCHEDULING_POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; `LLM` takes the same names.

    Attributes:
        model: alias, hub id, Hugging Face folder, ``.gguf`` file or saved checkpoint.
        dtype: of weights, activations and KV, where the next two do not say otherwise. "auto": float32 on CPU, the
            checkpoint's elsewhere.
        quantization: what matrices are held in: None = dtype, or as a quantised checkpoint of ours was saved. "int8",
            "fp8": a scale for each output, or for each row of the vocabulary's tables. "int4": a scale and a minimum
            for 32 values, with int8 tables. "gguf": the blocks of a quantised GGUF file as they are.
        kv_cache_dtype: what KV is held in: "auto" = dtype; "fp8" = float8_e4m3fn without scales; "int8" with a scale
            for every 64 lanes of a token's K and V. On TPUs int8 takes a block_size of 32, 64 or 128.
        max_model_len: most tokens (prompt + output) of a sequence; None = 2048, or what the model was trained
            for if that is less.
        block_size: tokens a block.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: token budget of a step.
        kv_cache_memory_bytes: size of the pool on each device; None = from memory_utilization.
        memory_utilization: share of a device's memory that weights, temporaries and pool may take.
        tensor_parallel_size: devices the heads, MLP columns and vocabulary are spread over.
        enable_expert_parallel: spread whole experts over those devices, instead of each expert's columns.
        data_parallel_size: replicas of the model, each with a pool and a batch of its own on tensor_parallel_size
            devices; one program runs them all. Limits, like max_num_seqs, are of each replica.
        preemption_mode: how a preempted request comes back: "recompute"; "swap", by host memory; or "auto", which
            swaps requests of several sequences. Where the swap space is full a request is recomputed.
        swap_space_bytes: host memory for swapped blocks, for each device; at most the pool; None = as large as the
            pool, but at most 4 GiB.
        scheduling_policy: "fcfs" serves in order of arrival; "priority" the lowest `priority` value first.
        long_prefill_token_threshold: most tokens of one prompt in one step; 0 = as many as the budget has.
        enable_prefix_caching: keep the KV of full blocks for later prompts that begin alike.
        prefix_eviction: in which order cached blocks are lost, see `jpaged.memory.MemoryManager`: "lru", "aligned", or
            "predicted", which also protects prefixes that recent prompts shared.
        kv_budget: layers drop most of a prompt's KV once it is computed, see `jpaged.PyramidKV`; None = they keep all.
            For models of full attention; not with prefix caching, int8 KV, replicas, several processes, deterministic.
        watermark: share of the pool kept free at admission, so that running sequences can grow.
        max_logprobs: most that a request's `logprobs` may ask for.
        seed: draws the seeds of requests that bring none.
        deterministic: a sequence's log-probabilities are the same to the last bit however it is batched, chunked,
            preempted or served from the cache. Slower: every token is computed by programs of one shape. Engines
            agree when they agree on max_num_seqs, max_model_len, block_size, dtype, device kind and count.
    """

    model: str
    dtype: str = "auto"
    quantization: Literal["int8", "int4", "fp8", "gguf"] | None = None
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    swap_space_bytes: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    prefix_eviction: Literal["lru", "aligned", "predicted"] = "aligned"
    kv_budget: PyramidKV | None = None
    watermark: float = 0.01
    max_logprobs: int = 20
    seed: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("prefix_eviction", self.prefix_eviction, PREFIX_EVICTIONS)
        _one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        sizes = "block_size", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "data_parallel_size"
        for name in sizes:
            _positive(name, getattr(self, name))
        if self.preemption_mode == "recompute" and self.swap_space_bytes is not None:
            raise ValueError(f"swap_space_bytes={self.swap_space_bytes!r} needs preemption_mode='swap' or 'auto'")
        for name in ("max_model_len", "kv_cache_memory_bytes", "swap_space_bytes"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.block_size % 8:
            raise ValueError(f"block_size={self.block_size} is not a multiple of 8 (a sublane tile)")
        for name in ("enable_prefix_caching", "enable_expert_parallel", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("memory_utilization", "watermark"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), int | float):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number")
        if self.data_parallel_size > 1:
            if self.preemption_mode != "recompute":
                raise ValueError(f"preemption_mode={self.preemption_mode!r} needs data_parallel_size=1")
            if self.deterministic:
                raise ValueError("deterministic=True needs data_parallel_size=1")
        if self.kv_budget is not None:
            self._check_kv_budget(self.kv_budget)
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"memory_utilization={self.memory_utilization} is outside (0, 1]")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark} is outside [0, 1)")
        for name in ("seed", "long_prefill_token_threshold", "max_logprobs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be a non-negative integer")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs="
                f"{self.max_num_seqs}: a step could not give every running sequence one token"
            )

    def _check_kv_budget(self, kv_budget: PyramidKV) -> None:
        if not isinstance(kv_budget, PyramidKV):
            raise ValueError(f"kv_budget={kv_budget!r} must be a PyramidKV or None")
        for name, needed in (("enable_prefix_caching", False), ("data_parallel_size", 1), ("deterministic", False)):
            if getattr(self, name) != needed:
                raise ValueError(f"{name}={getattr(self, name)!r}: kv_budget needs {name}={needed}")
        if self.kv_cache_dtype == "int8":
            raise ValueError("kv_cache_dtype='int8': kv_budget needs KV of 'auto' or 'fp8'")
        # What one prompt gets in a step in which all other sequences decode.
        least = self.max_num_batched_tokens - self.max_num_seqs + 1
        least = min(least, self.long_prefill_token_threshold or least)
        if kv_budget.window > least:
            raise ValueError(
                f"kv_budget.window={kv_budget.window} is above {least}, the tokens a prompt may get in a step "
                "(max_num_batched_tokens - max_num_seqs + 1, or long_prefill_token_threshold)"
            )


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
