"""Has the options that several commands share, and tells what the engine refuses as the command line does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[
    str,
    typer.Option(help="Alias (smollm2-135m), hub id, Hugging Face folder, .gguf file or saved checkpoint."),
]
DownloadDir = Annotated[
    str | None, typer.Option(help="Folder for models that are fetched; default: in the user's cache folder.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or, on GPUs, float16.")]
Quantization = Annotated[
    str | None, typer.Option(help="Hold matrices in int8, int4, fp8 or gguf (a quantised GGUF file's own blocks).")
]
KVCacheDtype = Annotated[str, typer.Option(help="Hold KV in auto (dtype), bfloat16, int8 or fp8.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a sequence; default 2048 or the model's limit.")
]
BlockSize = Annotated[int | None, typer.Option(min=8, help="Tokens a KV block; default: 128 on TPUs, 16 elsewhere.")]
MaxNumSeqs = Annotated[int | None, typer.Option(min=1, help="Sequences that run at once; default: by the device.")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(min=1, help="Token budget of a step; default: by the device.")]
KVBytes = Annotated[int | None, typer.Option(min=1, help="Bytes of the KV pool on each device; default: what is free.")]
PreemptionMode = Annotated[str, typer.Option(help="How preempted requests come back: recompute, swap or auto.")]
PrefixEviction = Annotated[
    str, typer.Option(help="Order in which cached prefixes are lost: lru, aligned or predicted (protects shared ones).")
]
TensorParallel = Annotated[int, typer.Option(min=1, help="Devices to shard heads, MLP and vocabulary over.")]
ExpertParallel = Annotated[
    bool, typer.Option("--enable-expert-parallel", help="Spread whole experts over those devices, not their columns.")
]
Speculative = Annotated[
    str | None,
    typer.Option(
        help="Verify drafts of the next tokens: ngram, layers:N (the first N layers draft) or draft:MODEL; behind it "
        "@K, the most drafts of a step. Outputs stay the same."
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 = all.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this fraction as likely as the best.")]
Presence = Annotated[float, typer.Option(help="Taken from the logits of tokens the output has.")]
Frequency = Annotated[float, typer.Option(help="Taken from a token's logit each time the output has it.")]
Repetition = Annotated[float, typer.Option(help="Divides the logits of tokens prompt or output have; 1 = off.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed of the samples; default: drawn from the engine's.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")]


@contextmanager
def bad_parameters() -> Iterator[None]:
    """Tell what the engine refuses as the command line tells its own errors."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def build_llm(model: str, *, speculative: str | None = None, **settings: Any) -> Any:
    """Build the engine; a setting that it refuses is told as the command line tells it."""
    from jpaged.llm import LLM

    with bad_parameters():
        return LLM(model, speculative=read_speculative(speculative), **settings)


def check_place(option: str, file: Path | None) -> None:
    """Check that the folder of a file exists, before the minutes of work whose result it takes.

    Raises:
        ValueError: there is no such folder; names the option that asked for the file.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {file.absolute().parent}")


def check_serve_extra() -> None:
    """Tell what to install where the server's libraries are not there."""
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise typer.BadParameter(f"{', '.join(missing)} not found: pip install 'jpaged[serve]'")


def check_otel_extra() -> None:
    """Tell what to install where the libraries that send traces are not there."""
    try:
        found = find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise typer.BadParameter("--otlp-traces-endpoint needs OpenTelemetry: pip install 'jpaged[otel]'")


def read_speculative(text: str | None) -> Any:
    """Return the setting that `--speculative` names.

    >>> read_speculative("ngram@6")
    NGram(tokens=6, longest=4, shortest=1)
    >>> read_speculative("layers:8")
    Layers(tokens=4, layers=8)

    Raises:
        ValueError: it names no way to make drafts.
    """
    from jpaged.speculative import DraftModel, Layers, NGram

    if text is None:
        return None
    what, _, number = text.rpartition("@") if re.search(r"@\d+$", text) else (text, "", "")
    tokens = {"tokens": int(number)} if number else {}
    kind, _, value = what.partition(":")
    if kind == "ngram" and not value:
        return NGram(**tokens)
    if kind == "layers" and value.isdecimal():
        return Layers(int(value), **tokens)
    if kind == "draft" and value:
        return DraftModel(value, **tokens)
    raise ValueError(f"speculative={text!r} is none of ngram, layers:N and draft:MODEL, with or without @K")
