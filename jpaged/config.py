"""The engine's settings. Each is one field: its default, its check, its flag, and its text below it.

To add a setting, add a field to `EngineConfig` and read it where it acts. The command line, the table of vLLM's names
and the reference in the documentation follow from the field, as do the facts of compiled programs, saved states and
step dumps, and the refusals by replicas and others: the field says what its value affects, what it needs and who
refuses it, see `jpaged.setting.Setting`. Only comparisons of sizes are functions.

The file is long because it holds each setting's text, which the command line and the documentation show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jpaged.image_sources import ImageSources
from jpaged.processor_settings import read_settings
from jpaged.pyramid_kv import PyramidKV
from jpaged.reasoning_config import ReasoningConfig, read_reasoning_config
from jpaged.setting import (
    Affects,
    Flag,
    Need,
    check_needs,
    choice,
    refuse,
    setting,
    settings_of,
    text,
    whole,
    with_facts,
)
from jpaged.short_values import short_values, shown
from jpaged.speculative import WAYS, Speculative, read_speculative
from jpaged.validation import instance, integer, optional, real, switch
from jpaged.vllm_refusals import name_in

if TYPE_CHECKING:
    from jpaged.model_api import LayerGroup

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8", "fp8")
QUANTIZATIONS = ("int8", "int4", "int4-32", "int4-64", "int4-128", "fp8", "gguf")
PREFIX_EVICTIONS = ("lru", "aligned", "predicted")
PREEMPTION_MODES = ("recompute", "swap", "auto")
SCHEDULING_POLICIES = ("fcfs", "priority")
_MOST_OF_A_MODALITY = 999
STATE_INTERVAL = 512
"""Tokens between the checkpoints of recurrent layers where `state_checkpoint_interval` is None."""


def _folders(name: str, modules: Any) -> dict[str, str]:
    """Take a mapping of names to folders; store paths as strings."""
    known = isinstance(modules, Mapping) and all(
        isinstance(key, str) and key and isinstance(path, str | Path) and str(path) for key, path in modules.items()
    )
    if not known:
        raise ValueError(f"{name}={modules!r} must map names to folders")
    return {key: str(path) for key, path in modules.items()}


def _named_folders(given: Sequence[str] | None) -> dict[str, str]:
    """Return the folders that ``--lora-modules NAME=FOLDER`` gives, by name."""
    modules = [module.partition("=") for module in given or ()]
    for name, _, path in modules:
        if not (name and path):
            raise ValueError(f"lora_modules={shown(name)} must be name=folder")
    names = [name for name, _, _ in modules]
    if len(set(names)) < len(names):
        raise ValueError(f"lora_modules gives two folders one name: {', '.join(names)}")
    return {name: path for name, _, path in modules}


def _image_sources(name: str, value: Any) -> ImageSources:
    """Take an `ImageSources` or a mapping of its fields."""
    made = ImageSources(**value) if isinstance(value, Mapping) else value
    return instance(ImageSources, "an ImageSources")(name, made)


def _limits(name: str, value: Any) -> dict[str, int]:
    """Take numbers by modality; vLLM's may be a mapping with ``count``, whose other keys are sizes to expect."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} must map modalities to numbers, as {{'image': 2, 'video': 0}}")
    limits = {}
    for modality, given in value.items():
        if modality not in ("image", "video", "audio"):
            raise ValueError(f"{name}={shown(value)}: {shown(modality)} is none of image, video and audio")
        if isinstance(given, Mapping):
            given = given.get("count", _MOST_OF_A_MODALITY)
        limits[modality] = integer(f"{name}.{modality}", given, low=0, high=_MOST_OF_A_MODALITY)
    return limits


def _settings_of_processor(name: str, value: Any) -> dict[str, Any]:
    return read_settings(value)


def _mapping_flag(name: str) -> Callable[[str | None], dict[str, Any]]:
    """Return what reads a mapping from a flag: JSON."""

    def read(given: str | None) -> dict[str, Any]:
        try:
            found = json.loads(given or "{}")
        except ValueError as error:
            raise ValueError(f"{name}={shown(given)} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{name}={shown(given)} must be a mapping in JSON")
        return found

    return read


def _image_flags(folders: Sequence[Path] | None, hosts: Sequence[str] | None) -> ImageSources:
    """Return the sources that the two flags for images allow."""
    return ImageSources(folders=tuple(folders or ()), hosts=tuple(hosts or ()))


def _answer_tokens(name: str, value: Any) -> tuple[str, ...]:
    tokens = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if len(tokens) not in (1, 2) or not all(isinstance(token, str) and token for token in tokens):
        raise ValueError(f"{name}={shown(value)} must be one or two tokens, such as ('no', 'yes')")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{name}={shown(value)} has one token twice")
    return tokens


_a_way = instance(Speculative, f"an {', '.join(way.__name__ for way in WAYS)} or None")


def _speculative(name: str, value: Any) -> Any:
    return read_speculative(value) if isinstance(value, str) else _a_way(name, value)


def _watermark(name: str, value: Any) -> float:
    share = real(0.0, 1.0)(name, value)
    if share == 1:
        raise ValueError(f"{name}={share} is outside [0, 1)")
    return share


@with_facts
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of one engine. `LLM` and `AsyncLLM` take them as keyword arguments of the same names.

    Raises:
        ValueError: a value is out of its range, or two settings exclude each other. The message names the setting, its
            value and the limit.
    """

    model: str
    """Alias (``smollm2-135m``), hub id, Hugging Face folder, ``.gguf`` file, URL or saved checkpoint."""

    tokenizer: str | None = setting(
        None, optional(text), affects=Affects.NOTHING, flag=Flag(commands="serve", help="Source of another tokenizer.")
    )
    """Source of another tokenizer, in the same forms as `model`. None takes the model's own."""

    chat_template: str | None = setting(None, optional(text), affects=Affects.NOTHING)
    """Text of a Jinja chat template in place of the tokenizer's own (``jpaged serve --chat-template FILE``)."""

    classifier_from_token: tuple[str, ...] | None = setting(
        None,
        optional(_answer_tokens),
        affects=Affects.NOTHING,
        flag=Flag(
            commands="serve",
            type=list[str] | None,
            help="Token of a reranker's answer: give it twice, for no and yes.",
        ),
    )
    """Tokens by which a reranker answers, in the order ("no", "yes"): `LLM.score` of a pair is the probability of the
    second among both. One token alone gives the sigmoid of its logit. None takes the tokens of the folder's LogitScore
    module, if it has one."""

    revision: str | None = setting(
        None,
        optional(text),
        affects=Affects.BLOCKS | Affects.STEPS,
        saved_as="weights",
        flag=Flag(commands="serve", help="Branch, tag or commit of a hub id."),
    )
    """Branch, tag or commit of a hub id. None takes its main branch."""

    download_dir: str | None = setting(
        None,
        optional(text),
        affects=Affects.NOTHING,
        flag=Flag(commands="model", help="Folder for fetched models; default: in the user's cache folder."),
    )
    """Folder for models from the hub and for the demo model. None takes their usual cache folders."""

    generation_config: str = setting(
        "auto",
        text,
        affects=Affects.NOTHING,
        flag=Flag(commands="serve", help="Default sampling: auto (the model's), vllm (none), or a folder."),
    )
    """Source of the generation_config.json that gives the default sampling: "auto" takes the model's, "vllm" none, else
    it is a folder. End-of-sequence tokens come from that folder, or from the model's file for "auto" and "vllm"."""

    dtype: str = setting(
        "auto",
        choice(DTYPES, {"half": "float16", "float": "float32"}),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="layout",
        from_model=True,
        flag=Flag(commands="model", help="auto, float32, bfloat16 or, on GPUs, float16."),
    )
    """Dtype of activations, of weights that are not quantised, and of KV where kv_cache_dtype is "auto". "half" and
    "float" mean float16 and float32.

    "auto" is float32 on a CPU and the checkpoint's dtype elsewhere, with two exceptions: GPUs below compute capability
    8.0, which lack bfloat16, take float16 instead of it, and TPUs take bfloat16 instead of float16. Only GPUs take
    float16.

    On one CPU with compiled loops (Numba, or those of the wheel), "float32" keeps the matrices of a bfloat16 checkpoint
    in bfloat16, in half the memory, and multiplies them in float32; it keeps other matrices in panels of columns.
    `LLM.params` turns them into arrays of float32. "bfloat16" on a CPU applies to matrices, to the values that they
    multiply, and to KV; sums, norms and the rest are float32. It needs compiled loops and one device."""

    quantization: Literal["int8", "int4", "int4-32", "int4-64", "int4-128", "fp8", "gguf"] | None = setting(
        None,
        optional(choice(QUANTIZATIONS)),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="layout",
        flag=Flag(
            commands="model",
            help="Hold matrices in int8, int4, int4-32 (64, 128), fp8 or gguf (a quantised GGUF file's own blocks).",
        ),
    )
    """Form of the weight matrices. None takes `dtype`, or the form of a quantised checkpoint. "int8" and "fp8" have a
    scale for each output, or for each row of the vocabulary's tables. "int4" has a scale and a minimum for each 32
    values, with int8 tables. "int4-32", "int4-64" and "int4-128" have them for as many values as they say, fitted by
    least squares while loading. "gguf" keeps the blocks of a quantised GGUF file."""

    kv_cache_dtype: Literal["auto", "bfloat16", "int8", "fp8"] = setting(
        "auto",
        choice(KV_CACHE_DTYPES, {"fp8_e4m3": "fp8"}),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="dtype",
        flag=Flag(commands="model", help="Hold KV in auto (dtype), bfloat16, int8 or fp8."),
    )
    """Form of the KV. "auto" takes dtype. "bfloat16" takes half of float32; it goes with any dtype on a CPU and with
    bfloat16 elsewhere. "fp8" (or "fp8_e4m3") is float8_e4m3fn without scales. "int8" has a scale for every 64 lanes of
    a token's K and V; on TPUs it needs a block_size of 32, 64 or 128."""

    max_model_len: int | None = setting(
        None,
        optional(whole(1)),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="layout",
        from_model=True,
        flag=Flag(commands="model", least=1, help="Most tokens of a sequence; default 2048 or the model's limit."),
    )
    """Most tokens (prompt and output) of a sequence. None takes 2048, or the length that the model was trained for if
    that is less. The limit is that length, extended by linear or YaRN scaling where the model's config has it."""

    block_size: int | None = setting(
        None,
        optional(whole(1)),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="groups",
        flag=Flag(commands="batch", least=8, help="Tokens of a KV block; default: 128 on TPUs, 16 elsewhere."),
        none_is_default=True,
    )
    """Number of tokens in a block; a multiple of 8. None takes 128 on TPUs, the width of their reads, and 16
    elsewhere."""

    state_checkpoint_interval: int | None = setting(
        None, optional(whole(1)), affects=Affects.PROGRAMS | Affects.BLOCKS, saved_as="groups"
    )
    """Tokens from one kept state of a model's recurrent layers to the next; a multiple of block_size. Prompts that
    begin alike can continue from a kept state, and from the end of a prompt that recent requests shared. None takes
    512, or the next multiple of block_size, and up to four times as many inside a prompt where a state takes more than
    the KV of the tokens in between. Models without such layers ignore it."""

    max_num_seqs: int | None = setting(
        None,
        optional(whole(1)),
        affects=Affects.PROGRAMS,
        flag=Flag(commands="batch", least=1, help="Sequences that run at once; default: by the device."),
        none_is_default=True,
    )
    """Most sequences that run at once, at most max_num_batched_tokens. None chooses by the device and its memory, from
    64 on a CPU to 256."""

    max_num_batched_tokens: int | None = setting(
        None,
        optional(whole(1)),
        affects=Affects.PROGRAMS,
        from_model=True,
        flag=Flag(commands="batch", least=1, help="Token budget of a step; default: by the device."),
        none_is_default=True,
    )
    """Most tokens of a step, at least max_num_seqs. None chooses by the device and its memory, from 512 on a CPU to
    8192."""

    kv_cache_memory_bytes: int | None = setting(
        None,
        optional(whole(1)),
        affects=Affects.NOTHING,
        flag=Flag(commands="batch", least=1, help="Bytes of the KV pool on each device; default: what is free."),
    )
    """Size of the pool on each device. None takes the memory that memory_utilization leaves; on a CPU at most 4 GiB and
    an eighth of the free memory, rounded down to a power of two or one and a half times one. A CPU's pool takes memory
    as it fills."""

    memory_utilization: float = setting(
        0.9,
        real(0.0, 1.0, above=True),
        affects=Affects.NOTHING,
        flag=Flag(commands="serve", help="Share of a device's memory to take."),
        vllm="gpu_memory_utilization",
    )
    """Share of a device's memory that weights, temporaries and pool may take. On a GPU it is a share of the 95 % that
    JAX takes, or of XLA_CLIENT_MEM_FRACTION."""

    tensor_parallel_size: int = setting(
        1,
        whole(1),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="layout",
        flag=Flag(commands="model", least=1, help="Devices to shard heads, MLP and vocabulary over."),
    )
    """Number of devices over which heads, MLP columns and vocabulary are sharded."""

    enable_expert_parallel: bool = setting(
        False,
        switch,
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="layout",
        flag=Flag(commands="model", help="Spread whole experts over those devices, not their columns."),
    )
    """Whether those devices hold whole experts, instead of columns of every expert."""

    data_parallel_size: int = setting(
        1,
        whole(1),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="replicas",
        refused={
            "several hosts": "one process has all replicas",
            "plans": "a plan is of one replica",
            "programs for absent devices": "programs are of one replica",
            "models without KV": "one replica computes its prompts",
        },
        flag=Flag(commands="serve", least=1, help="Replicas of the model in this process."),
    )
    """Number of replicas of the model. Each has a pool and a batch of its own on tensor_parallel_size devices; one
    program runs them all. Limits such as max_num_seqs hold for each replica."""

    preemption_mode: Literal["recompute", "swap", "auto"] = setting(
        "recompute",
        choice(PREEMPTION_MODES),
        affects=Affects.NOTHING,
        flag=Flag(commands="batch", help="How preempted requests come back: recompute, swap or auto."),
        none_is_default=True,
    )
    """How a preempted request comes back: "recompute" computes its tokens again, "swap" keeps its blocks in host
    memory, "auto" swaps requests of several sequences and recomputes others. A request is recomputed where the
    swap space is full."""

    swap_space_bytes: int | None = setting(
        None, optional(whole(1)), affects=Affects.NOTHING, needs=Need("preemption_mode", ("swap", "auto"))
    )
    """Host memory for swapped blocks, for each device; at most the pool, and with kv_offloading_size what adapters in
    use leave of that. None takes the pool's size, at most 4 GiB."""

    swap_space: float | None = setting(
        None,
        optional(real(0.0, above=True)),
        affects=Affects.NOTHING,
        needs=Need("preemption_mode", ("swap", "auto")),
        flag=Flag(commands="requests", help="GiB of host memory for swapped requests. Default: the pool, at most 4."),
    )
    """vLLM's form of swap_space_bytes, in GiB, with the same bounds. Without a preemption_mode it implies "auto"."""

    kv_offloading_size: float | None = setting(
        None,
        optional(real(0.0, above=True)),
        affects=Affects.NOTHING,
        needs=Need("enable_prefix_caching", (True,), "it keeps cached blocks"),
        refused={
            "replicas": "replicas keep no blocks in host memory",
            "several hosts": "each host has a part of every block",
            "models without KV": "there are no blocks to keep",
        },
        flag=Flag(commands="requests", help="GiB of host memory that keeps cached KV. Default: none."),
    )
    """GiB of host memory that keeps cached blocks, those of all devices together, as in vLLM. Blocks are copied there
    as they fill, and come back where that is faster than computing their tokens. Swapped blocks and low-rank adapters
    count in it too. It needs enable_prefix_caching, one replica and one host."""

    kv_offloading_break_even: int | None = setting(
        None, optional(whole(1)), affects=Affects.NOTHING, needs=Need("kv_offloading_size")
    )
    """Fewest tokens that are loaded from host memory rather than computed. None takes the measured number."""

    disk_folder: str | None = setting(
        None,
        optional(text),
        affects=Affects.NOTHING,
        needs=Need("enable_prefix_caching", (True,), "it keeps cached blocks"),
        refused={
            "replicas": "replicas move no blocks to disk",
            "several hosts": "each host has a part of every block",
            "models without KV": "there are no blocks to keep",
        },
        flag=Flag(commands="requests", help="Folder of a local disk that keeps copies of cached KV. Default: none."),
    )
    """Folder of a local disk to which cached blocks are copied as they fill, and which later processes read too. None
    keeps none. The engine reads them ahead of the step that needs them, where it measured that reading is faster than
    computing their tokens. It needs enable_prefix_caching, one replica and one host."""

    disk_space: float | None = setting(
        None,
        optional(real(0.0, above=True)),
        affects=Affects.NOTHING,
        needs=Need("disk_folder"),
        flag=Flag(commands="requests", help="GiB of that disk to take. Default: 8."),
    )
    """GiB of that disk to take. None takes 8."""

    disk_break_even: int | None = setting(None, optional(whole(1)), affects=Affects.NOTHING, needs=Need("disk_folder"))
    """Fewest tokens that are read from disk rather than computed. None takes the measured number."""

    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs",
        choice(SCHEDULING_POLICIES),
        affects=Affects.NOTHING,
        flag=Flag(commands="serve", help="fcfs: by arrival; priority: lowest value first."),
    )
    """Order of service: "fcfs" by arrival, "priority" the lowest `priority` value first."""

    long_prefill_token_threshold: int = setting(
        0,
        whole(0),
        affects=Affects.NOTHING,
        refused={"models without KV": "a prompt is not cut"},
        flag=Flag(commands="serve", least=0, help="Most tokens of one prompt in one step; 0 = the token budget."),
    )
    """Most tokens of one prompt in one step. 0 allows the whole token budget."""

    enable_prefix_caching: bool = setting(
        True,
        switch,
        affects=Affects.BLOCKS | Affects.STEPS,
        saved_as="prefix_caching",
        flag=Flag(commands="serve", help="Keep the KV of prompts for those that begin alike."),
        none_is_default=True,
    )
    """Whether the KV of full blocks is kept for later prompts that begin alike."""

    prefix_eviction: Literal["lru", "aligned", "predicted"] = setting(
        "aligned",
        choice(PREFIX_EVICTIONS),
        affects=Affects.BLOCKS,
        flag=Flag(
            commands="model",
            help="Order in which cached prefixes are lost: lru, aligned or predicted (protects shared ones).",
        ),
    )
    """Order in which cached blocks are evicted, see `jpaged.memory.MemoryManager`: "lru", "aligned", or "predicted",
    which also protects prefixes that recent prompts shared."""

    cache_salt_bytes: int | None = setting(
        None,
        optional(whole(1)),
        affects=Affects.NOTHING,
        needs=Need("enable_prefix_caching", (True,)),
        refused={"models without KV": "there are no blocks to keep"},
        flag=Flag(commands="requests", least=1, help="Most bytes of cached KV, on one device, of one cache_salt."),
    )
    """Most bytes, on one device, of the cached KV of one cache_salt that no request uses. A salt over its limit loses
    blocks of its own, those of the lowest priority and least recently needed first. None sets no limit, and prompts
    without a salt have none."""

    kv_cache_events: int | None = setting(
        None,
        optional(whole(1)),
        affects=Affects.NOTHING,
        flag=Flag(commands="requests", least=1, help="Changes of cached blocks kept for readers, such as routers."),
    )
    """How many of the last changes of cached blocks are kept for readers: which content the pool, host memory and the
    disk have from now on, or no longer. None keeps none; where nothing is cached there are none."""

    kv_budget: PyramidKV | None = setting(
        None,
        optional(instance(PyramidKV, "a PyramidKV or None")),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="groups",
        needs=(
            Need("enable_prefix_caching", (False,), "blocks without some of their tokens serve no other prompt"),
            Need("deterministic", (False,), "it computes token by token, but a prompt's last tokens choose together"),
            Need("kv_cache_dtype", ("auto", "bfloat16", "fp8")),
        ),
        refused={
            "replicas": "replicas drop no tokens",
            "plans": "what is kept depends on the prompts",
            "programs for absent devices": "programs that drop tokens are not among them",
            "models without KV": "there is nothing to drop",
        },
    )
    """A `jpaged.PyramidKV`: layers drop most of a prompt's KV after it is computed. None keeps all of it. It needs a
    model of full attention, and excludes prefix caching, int8 KV, replicas and deterministic."""

    speculative: Speculative | None = setting(
        None,
        optional(_speculative),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="groups",
        needs=Need("kv_budget", (None,)),
        refused={
            "replicas": "replicas verify no drafts",
            "several hosts": "drafts are made in one process",
            "plans": "what drafts cost and gain depends on the text",
            "programs for absent devices": "programs of drafts are not among them",
            "models without KV": "no tokens are generated",
        },
        flag=Flag(
            commands="model",
            type=str | None,
            help="Verify drafts of the next tokens: ngram, layers:N (the first N layers draft), draft:MODEL, mtp "
            "(the checkpoint's own head), eagle3:MODEL, assistant:MODEL (Gemma 4's) or dflash:MODEL, then @K, the most "
            "drafts of a step. Outputs stay the same.",
        ),
        from_flags=read_speculative,
    )
    """How drafts of the next tokens are made, several of which a step verifies: a `jpaged.NGram`, `jpaged.Layers`,
    `jpaged.DraftModel`, `jpaged.MTP`, `jpaged.Eagle3`, `jpaged.Assistant` or `jpaged.DFlash`, or a text that
    `--speculative` takes, as ``"ngram"``. None makes no drafts. Drafts change no token. Requests with beams run without
    them. A sequence then holds one state of each recurrent layer for each draft, and one more. It excludes kv_budget,
    replicas and several hosts."""

    reasoning_config: ReasoningConfig | None = setting(
        None,
        optional(read_reasoning_config),
        affects=Affects.NOTHING,
        flag=Flag(
            commands="requests",
            type=str | None,
            help="JSON with the text that ends thoughts without tokens left, before their mark: "
            '{"reasoning_end_str": "I have to answer now."}. Default: the mark alone.',
        ),
    )
    """How the thoughts of requests with a thinking_token_budget end, unless their parameters say so: a
    `jpaged.ReasoningConfig`, or a mapping of its fields. None ends them by their format's mark alone."""

    watermark: float = setting(0.0, _watermark, affects=Affects.NOTHING)
    """Share of the pool that admission keeps free, so that running sequences can grow: fewer are preempted, and fewer
    run. At 0, as in vLLM, the same requests take as many steps or fewer (docs/against_vllm.md)."""

    max_logprobs: int = setting(
        20,
        whole(-1),
        affects=Affects.NOTHING,
        flag=Flag(commands="serve", least=-1, help="Most log-probabilities to ask for at each token."),
    )
    """Most tokens that a request's `logprobs` may ask for. -1 allows the whole vocabulary."""

    cumulative_logprobs: bool = setting(False, switch, affects=Affects.PROGRAMS)
    """Whether every output has its cumulative_logprob. By default it is None, as in vLLM, where a request asks for no
    `logprobs` and has no beams. Steps whose sequences all take their most likely token then need no logits where one
    CPU with VNNI and Numba holds the vocabulary's table in float32: a copy in 8 bits, a quarter of its memory, finds
    the few candidates, and only these are multiplied. The tokens are the same."""

    seed: int = setting(
        0,
        whole(0),
        affects=Affects.NOTHING,
        flag=Flag(commands="serve", least=0, help="Seed from which those of requests are drawn."),
        none_is_default=True,
    )
    """Seed from which the seeds of requests that bring none are drawn."""

    enforce_eager: bool = setting(
        False,
        switch,
        affects=Affects.NOTHING,
        refused={"programs for absent devices": "it compiles nothing ahead"},
    )
    """Whether nothing is compiled ahead: `LLM.warmup` does nothing, and a shape is compiled when a step first has
    it."""

    background_compilation: bool = setting(
        False,
        switch,
        affects=Affects.NOTHING,
        needs=Need("enforce_eager", (False,), "it compiles nothing ahead"),
        refused={"several hosts": "hosts compile together"},
    )
    """Whether the start compiles only the shapes that first requests need, and a thread compiles the others while the
    engine runs. Until a shape is compiled, its steps are padded to a larger compiled one, which changes
    log-probabilities in their last bits. `jpaged serve` asks for it. It excludes enforce_eager and several hosts."""

    disable_log_stats: bool = setting(False, switch, affects=Affects.NOTHING)
    """Whether the log "jpaged" leaves out its lines about throughput while requests run."""

    compiled_programs: str | None = setting(
        None,
        optional(text),
        affects=Affects.NOTHING,
        refused={
            "several hosts": "a folder has programs of one process",
            "plans": "the step is compiled anew",
            "programs for absent devices": "programs are compiled anew",
        },
        flag=Flag(commands="model", help="Folder of `jpaged compile` to load programs from. Default: compile here."),
    )
    """Folder that `jpaged compile` wrote, from which programs are loaded instead of traced and compiled. It has to
    match the model, these settings, versions and machine. It sets the pool's size where kv_cache_memory_bytes does
    not. A folder of programs is code: take it from a source that you trust."""

    images: ImageSources = setting(
        check=_image_sources,
        factory=ImageSources,
        affects=Affects.NOTHING,
        refused={
            "plans": "no prompt is read",
            "programs for absent devices": "no prompt is read",
        },
        flag=(
            Flag(
                commands="requests",
                name="allowed_local_media_path",
                type=list[Path] | None,
                help="Folder whose images requests may name as file: URLs; may be repeated. Default: none.",
            ),
            Flag(
                commands="requests",
                name="allowed_media_domains",
                type=list[str] | None,
                help="Host, or host:port, whose images requests may name; may be repeated. Default: none.",
            ),
        ),
        from_flags=_image_flags,
    )
    """Sources of prompts' images and their largest size: a `jpaged.ImageSources`, or a mapping of its fields. By
    default PIL images and ``data:`` URLs, of at most 50 million pixels, 16 a prompt."""

    limit_mm_per_prompt: Mapping[str, int] = setting(
        check=_limits,
        factory=dict,
        affects=Affects.NOTHING,
        refused={"plans": "no prompt is read", "programs for absent devices": "no prompt is read"},
        flag=Flag(
            commands="requests",
            type=str | None,
            help='Most images and videos of one prompt, as JSON: \'{"image": 2, "video": 0}\'.',
        ),
        from_flags=_mapping_flag("limit_mm_per_prompt"),
    )
    """Most items of one prompt by modality, in place of `images`' own numbers: ``{"image": 2, "video": 0}``. 0 refuses
    the modality."""

    mm_processor_kwargs: Mapping[str, Any] = setting(
        check=_settings_of_processor,
        factory=dict,
        affects=Affects.PROGRAMS,  # the largest picture bounds the rows of patches
        flag=Flag(
            commands="requests",
            type=str | None,
            help="Settings of the model's image processor in place of the checkpoint's, as JSON.",
        ),
        from_flags=_mapping_flag("mm_processor_kwargs"),
    )
    """Settings of the model's image and video processor in place of those in the checkpoint's folder, as
    ``{"max_pixels": 1003520}``, which also bounds a tower's memory. A prompt's own come on top. Images with other
    settings are cached apart."""

    language_model_only: bool = setting(
        False,
        switch,
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="layout",
        refused={"programs for absent devices": "programs are of the whole model"},
        flag=Flag(commands="model", help="Load only the language model of a vision-language model."),
    )
    """Whether only the language model of a vision-language model is loaded."""

    mmproj: str | None = setting(
        None,
        optional(text),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="layout",
        needs=Need("language_model_only", (False,)),
        refused={
            "plans": "a plan reads the text model's file alone",
            "programs for absent devices": "programs are of the text model's file alone",
        },
        flag=Flag(commands="model", help="GGUF file of the vision tower of a model that is a GGUF file."),
    )
    """GGUF file of the vision tower (``mmproj``) of a `model` that is a GGUF file, so that prompts may have images.
    None reads the text model alone."""

    enable_lora: bool = setting(
        False,
        switch,
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="groups",
        needs=Need("kv_budget", (None,)),
        refused={
            "several hosts": "adapters are loaded in one process",
            "models without KV": "adapters lie in the pool",
        },
        flag=Flag(commands="adapters", help="Have programs for low-rank adapters; --lora-modules does."),
    )
    """Whether requests may run with low-rank adapters (LoRA), which are loaded into the pool at need. It excludes
    kv_budget and several hosts."""

    max_loras: int = setting(
        1,
        whole(1),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="groups",
        needs=Need("enable_lora", (True,)),
        flag=Flag(commands="adapters", least=1, help="Most different adapters of a step."),
    )
    """Most different adapters of a step. A request whose adapter would be one more waits."""

    max_cpu_loras: int | None = setting(
        None,
        optional(whole(1)),
        affects=Affects.NOTHING,
        needs=Need("enable_lora", (True,)),
        flag=Flag(commands="requests", least=1, help="Most adapters in host memory. Default: as many as it holds."),
    )
    """Most adapters that host memory keeps, at least max_loras. Those that no unfinished request uses are dropped,
    least recently used first, and read again from their folders when a request names them. None keeps as many as half
    of kv_offloading_size holds, or all where that is not given either."""

    max_lora_rank: int = setting(
        16,
        whole(1),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        saved_as="groups",
        needs=Need("enable_lora", (True,)),
        flag=Flag(commands="adapters", least=1, help="Largest rank of an adapter."),
    )
    """Largest rank of an adapter."""

    lora_modules: Mapping[str, str] = setting(
        check=_folders,
        factory=dict,
        affects=Affects.NOTHING,
        needs=Need("enable_lora", (True,)),
        flag=Flag(
            commands="requests",
            type=list[str] | None,
            help="name=folder of a PEFT adapter, served as a model; may be repeated.",
        ),
        from_flags=_named_folders,
    )
    """PEFT folders to read at the start, by the names that requests use. They need enable_lora."""

    deterministic: bool = setting(
        False,
        switch,
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        refused={
            "replicas": "steps of several replicas are not cut into launches",
            "models without KV": "its programs compute token by token",
        },
        flag=Flag(commands="batch", help="Give the same results to the last bit in any batch; slower."),
    )
    """Whether a sequence's log-probabilities are the same to the last bit however it is batched, chunked, preempted or
    served from the cache. It is slower: programs of one shape compute every token. Engines agree when they agree on
    max_num_seqs, max_model_len, block_size, dtype, device kind and count."""

    @short_values()
    def __post_init__(self) -> None:
        for name, known in settings_of(type(self)).items():
            if known.check is not None:
                object.__setattr__(self, name, known.check(name, getattr(self, name)))
        check_needs(self)
        if self.data_parallel_size > 1:
            refuse(self, "replicas", f"needs data_parallel_size=1, not {self.data_parallel_size}")
        _check_sizes(vars(self))
        for part in (self.kv_budget, self.speculative):
            if part is not None:
                part.check_settings(vars(self))

    def layer_groups(self, groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
        """Return a model's layer groups as these settings change them.

        Raises:
            ValueError: kv_budget does not fit the model.
        """
        return tuple(groups) if self.kv_budget is None else self.kv_budget.apply(groups)


@dataclass(frozen=True, kw_only=True)
class SizedConfig(EngineConfig):
    """Settings of an engine whose device is known: every size has a value. `LLM.config` is one."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def num_rows(self) -> int:
        """Return the rows of a step's sampler: one for each sequence, and enough for a lone sequence and its drafts."""
        return max(self.max_num_seqs, 1 + (0 if self.speculative is None else self.speculative.tokens))

    @property
    def moves_blocks(self) -> bool:
        """Tell whether steps move blocks of sequences between the pool and host memory or a disk."""
        tiers = self.kv_offloading_size, self.disk_folder
        return self.preemption_mode != "recompute" or any(tier is not None for tier in tiers)

    @property
    def state_interval(self) -> int:
        """Return state_checkpoint_interval, or its default where it is None."""
        return self.state_checkpoint_interval or -(-STATE_INTERVAL // self.block_size) * self.block_size


def _check_sizes(settings: Mapping[str, Any]) -> None:
    """Compare the sizes among settings.

    Raises:
        ValueError: two of them exclude each other.
    """
    size, interval = settings["block_size"], settings["state_checkpoint_interval"]
    if size is not None and size % 8:
        raise ValueError(f"block_size={size} is not a multiple of 8 (a sublane tile)")
    if size is not None and interval is not None and interval % size:
        raise ValueError(f"state_checkpoint_interval={interval} is not a multiple of block_size={size}")
    tokens, sequences = settings["max_num_batched_tokens"], settings["max_num_seqs"]
    if tokens is not None and sequences is not None and tokens < sequences:
        raise ValueError(
            f"max_num_batched_tokens={tokens} is below max_num_seqs={sequences}: a step could not give every "
            "running sequence one token"
        )
    active, kept = settings["max_loras"], settings["max_cpu_loras"]
    if active is not None and kept is not None and kept < active:
        raise ValueError(f"max_cpu_loras={kept} is below max_loras={active}, the adapters of one step")
    given, in_bytes = settings["swap_space"], settings["swap_space_bytes"]
    if given is not None and in_bytes is not None:
        raise ValueError(f"swap_space={given} and swap_space_bytes={in_bytes} are one setting: give one of them")


__path__: list[str] = []  # vLLM has modules within this one, and Python looks for them in packages only

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = partial(name_in, __name__)
