"""Has the options of the command line that are settings of the engine, each in one place for all commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from jpaged.cli.options import (
    BlockSize,
    DownloadDir,
    Dtype,
    ExpertParallel,
    KVBytes,
    KVCacheDtype,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    PreemptionMode,
    PrefixEviction,
    Quantization,
    Speculative,
    TensorParallel,
    bad_parameters,
    build_llm,
)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of every command that runs a model; a field is an option of its name."""

    download_dir: DownloadDir = None
    dtype: Dtype = "auto"
    quantization: Quantization = None
    kv_cache_dtype: KVCacheDtype = "auto"
    max_model_len: MaxModelLen = None
    prefix_eviction: PrefixEviction = "predicted"
    speculative: Speculative = None
    tensor_parallel_size: TensorParallel = 1
    enable_expert_parallel: ExpertParallel = False
    compiled_programs: Annotated[
        str | None, typer.Option(help="Folder of `jpaged compile` to load programs from. Default: compile here.")
    ] = None
    language_model_only: Annotated[
        bool, typer.Option("--language-model-only", help="Load the language model alone of a model that sees images.")
    ] = False

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `jpaged.LLM`.

        Raises:
            ValueError: a value is refused before there is an engine.
        """
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def build(self, model: str, **more: Any) -> Any:
        """Build the engine; what it refuses is told as the command line tells it."""
        with bad_parameters():
            settings = self.settings()
        return build_llm(model, **settings, **more)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """Options of commands that run many requests at once."""

    block_size: BlockSize = None
    max_num_seqs: MaxNumSeqs = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    kv_cache_memory_bytes: KVBytes = None
    preemption_mode: PreemptionMode = "recompute"


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(EngineOptions):
    """Options of commands whose engines may have low-rank adapters."""

    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Have programs for low-rank adapters; --lora-modules does.")
    ] = False
    max_loras: Annotated[int, typer.Option(min=1, help="Most different adapters of a step.")] = 1
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = 16


@dataclass(frozen=True, kw_only=True)
class RequestOptions(AdapterOptions):
    """Options of commands whose requests are OpenAI's, and may have images and name adapters."""

    allowed_local_media_path: Annotated[
        list[Path] | None,
        typer.Option(help="Folder whose images requests may name as file: URLs; may be repeated. Default: none."),
    ] = None
    allowed_media_domains: Annotated[
        list[str] | None,
        typer.Option(help="Host, or host:port, whose images requests may name; may be repeated. Default: none."),
    ] = None

    disk_folder: Annotated[
        str | None, typer.Option(help="Folder of a local disk for cached KV that the pool loses. Default: none.")
    ] = None
    disk_space: Annotated[float | None, typer.Option(help="GiB of that disk to take. Default: 8.")] = None

    lora_modules: Annotated[
        list[str] | None, typer.Option(help="name=folder of a PEFT adapter, served as a model; may be repeated.")
    ] = None

    def settings(self) -> dict[str, Any]:
        from jpaged import ImageSources

        settings = super().settings()
        folders, hosts = settings.pop("allowed_local_media_path"), settings.pop("allowed_media_domains")
        settings["images"] = ImageSources(folders=tuple(folders or ()), hosts=tuple(hosts or ()))
        modules = _named_folders(settings.pop("lora_modules") or ())
        settings["enable_lora"] = settings["enable_lora"] or bool(modules)
        return settings | {"lora_modules": modules}


def _named_folders(given: Sequence[str]) -> dict[str, str]:
    """Return the folders of ``lora_modules``, each ``name=folder``, by name."""
    modules = [module.partition("=") for module in given]
    for name, _, path in modules:
        if not (name and path):
            raise ValueError(f"lora_modules={name!r} must be name=folder")
    names = [name for name, _, _ in modules]
    if len(set(names)) < len(names):
        raise ValueError(f"lora_modules gives two folders one name: {', '.join(names)}")
    return {name: path for name, _, path in modules}


@dataclass(frozen=True, kw_only=True)
class ServeOptions(RequestOptions):
    """Options of the engine behind a server."""

    tokenizer: Annotated[str | None, typer.Option(help="Source of another tokenizer.")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None
    generation_config: Annotated[str, typer.Option(help="Default sampling: auto (the model's), vllm, a folder.")] = (
        "auto"
    )
    memory_utilization: Annotated[float, typer.Option(help="Share of a device's memory to take.")] = 0.9
    enable_prefix_caching: Annotated[bool, typer.Option(help="Keep the KV of prompts for those that begin alike.")] = (
        True
    )
    scheduling_policy: Annotated[str, typer.Option(help="fcfs, or priority: requests say theirs.")] = "fcfs"
    max_logprobs: Annotated[int, typer.Option(min=-1, help="Most log-probabilities of a place.")] = 20
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Replicas of the model in this process.")] = 1
    seed: Annotated[int, typer.Option(min=0, help="Seed from which those of requests are drawn.")] = 0


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its parameter `engine`, whose annotation is one of the above.

    >>> @with_engine_options
    ... def size(model: str, *, engine: EngineOptions) -> None:
    ...     print(engine.block_size)
    >>> size(model="m", **(EngineOptions().__dict__ | {"block_size": 8}))
    8
    """
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["engine"].annotation
    hints = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
    ]
    own = [each for name, each in signature.parameters.items() if name != "engine"]
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *options)]

    @wraps(command)
    def call(**given: Any) -> None:
        chosen = kind(**{option.name: given.pop(option.name) for option in options})
        command(**given, engine=chosen)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call
