"""The command ``jpaged generate``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import (
    Frequency,
    MaxTokens,
    MinP,
    Model,
    Presence,
    Repetition,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    sampling,
)
from jpaged.cli.printing import print_rule, print_text
from jpaged.errors import GenerationInterrupted

STOPPED = 130
"""Exit status after Ctrl-C, as shells have it: 128 and the signal's number."""


@with_engine_options("batch")
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; or use --file.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File with one prompt a line.")] = None,
    model: Model = "smollm2-135m",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    n: Annotated[int, typer.Option(min=1, help="Outputs of each prompt.")] = 1,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    repetition_penalty: Repetition = 1.0,
    min_tokens: Annotated[int, typer.Option(min=0, help="Least tokens before an end.")] = 0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option(help="Continue after the end-of-sequence token.")] = False,
    stream: Annotated[bool, typer.Option(help="Print the output of a single prompt as it is generated.")] = False,
    memory: Annotated[bool, typer.Option(help="Print the memory table afterwards.")] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Complete prompts in one batch and print the outputs."""
    texts = list(prompts or [])
    if file is not None:
        texts += read_prompts(file)
    if not texts:
        raise typer.BadParameter("give prompts, or --file with one prompt a line")
    if stream and len(texts) > 1:
        raise typer.BadParameter(f"--stream shows one prompt, not {len(texts)}")
    if stream and n > 1:
        raise typer.BadParameter(f"--stream shows one output, not --n {n}")
    params = sampling(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        min_tokens=min_tokens,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    llm = engine.build(model, reads_text=True)
    if stream:
        print_text(texts[0], end="", bold=True)
        try:
            with llm.control.compilation_notes():
                print_stream(_refusing(lambda: llm.stream(texts[0], params)))
        except KeyboardInterrupt as interrupt:
            print_text("")
            raise _stopped() from interrupt
    interrupted = False
    try:
        outputs = [] if stream else llm.generate(texts, params, on_error="return")
    except GenerationInterrupted as interrupt:
        outputs, interrupted = interrupt.outputs, True
    for output in outputs:
        if output.error is not None:
            print_rule()
            print_text(_beginning(output.prompt), bold=True)
            print_text(f"refused: {output.error}", fg="red")
        for completion in output.outputs:
            print_rule()
            print_text(output.prompt, end="", bold=True)
            print_text(completion.text)
    if interrupted:
        raise _stopped()
    if memory:
        print_text(str(llm.memory_report()))
    if any(output.error is not None for output in outputs):
        raise typer.Exit(1)


def _stopped() -> typer.Exit:
    """Say that Ctrl-C ended the command, and return its end."""
    typer.echo("stopped: this is the text so far", err=True)
    return typer.Exit(STOPPED)


def read_prompts(file: Path) -> list[str]:
    """Return the lines of a file that are not empty. A line feed ends a line, with or without a carriage return."""
    try:
        lines = (line.removesuffix("\r") for line in file.read_bytes().decode("utf-8").split("\n"))
        return [line for line in lines if line]
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file} is not UTF-8: {error}") from error


def _beginning(text: str) -> str:
    """Return the first line of a text, at most 80 characters of it."""
    line = text.partition("\n")[0][:80]
    return line if line == text else f"{line}..."


def print_stream(deltas: Iterable[Any]) -> str:
    """Print the text of each delta as it comes, and return the whole text."""
    pieces = []
    for delta in deltas:
        pieces.append(delta.text)
        print_text(delta.text, end="")
    print_text("")
    return "".join(pieces)


def _refusing(stream: Callable[[], Iterable[Any]]) -> Iterable[Any]:
    """Yield an engine's deltas, with its refusals, and not the printer's errors, as errors of the command line."""
    try:
        yield from stream()
    except ValueError as error:  # there is one prompt, which needs no number
        raise typer.BadParameter(str(error).removeprefix("prompt 0: ")) from error
