"""Has the options that several commands share, and tells what the engine refuses as the command line does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Option(help="Alias (smollm2-135m), hub id, Hugging Face folder, .gguf file or saved checkpoint."),
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
