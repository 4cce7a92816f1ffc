"""Has the commands of the command line: ``jpaged generate|chat|serve|run-batch|convert|compile|plan|bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged import __version__
from jpaged.cli.bench import app as bench
from jpaged.cli.compile import compile_model
from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.examples import examples
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
    bad_parameters,
)
from jpaged.cli.plan import plan
from jpaged.cli.printing import print_rule, print_stream, print_text, refusals_told
from jpaged.cli.run_batch import run_batch
from jpaged.cli.serve import serve

app = typer.Typer(
    no_args_is_help=True,
    epilog=examples("jpaged"),
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,  # Rich's tables cut the names of long options in a terminal of 80 columns
)


def _print_version(asked: bool) -> None:
    """Print the version and end the program, if that was asked."""
    if asked:
        typer.echo(f"jpaged {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve large language models from JAX with paged KV memory."""


@app.command(epilog=examples("generate"))
@with_engine_options("batch")
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; or use --file.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A file of one prompt a line.")] = None,
    model: Model = "smollm2-135m",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    n: Annotated[int, typer.Option(min=1, help="Outputs a prompt.")] = 1,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    repetition_penalty: Repetition = 1.0,
    min_tokens: Annotated[int, typer.Option(min=0, help="No end before this many tokens.")] = 0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after end-of-sequence.")] = False,
    stream: Annotated[bool, typer.Option(help="Print the text of a single prompt as it comes.")] = False,
    memory: Annotated[bool, typer.Option(help="Print the memory table afterwards.")] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Complete one or many prompts in one batch and print the texts."""
    texts = list(prompts or [])
    if file is not None:
        texts += _lines(file)
    if not texts:
        raise typer.BadParameter("give prompts, or --file with one a line")
    if stream and len(texts) > 1:
        raise typer.BadParameter(f"--stream shows one prompt, not {len(texts)}")
    if stream and n > 1:
        raise typer.BadParameter(f"--stream shows one output, not --n {n}")
    params = _sampling(
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
    llm = engine.build(model)
    if stream:
        print_text(texts[0], end="", bold=True)
        with bad_parameters():
            deltas = llm.stream(texts[0], params)
        print_stream(refusals_told(deltas))
    outputs = [] if stream else llm.generate(texts, params, on_error="return")
    for output in outputs:
        if output.error is not None:
            print_rule()
            print_text(output.prompt, bold=True)
            print_text(f"refused: {output.error}", fg="red")
        for completion in output.outputs:
            print_rule()
            print_text(output.prompt, end="", bold=True)
            print_text(completion.text)
    if memory:
        print_text(str(llm.memory_report()))
    if any(output.error is not None for output in outputs):
        raise typer.Exit(1)


@app.command(epilog=examples("chat"))
@with_engine_options("model")
def chat(
    model: Model = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    *,
    engine: EngineOptions,
) -> None:
    """Talk to a model, one turn at a time.

    An empty line or end of input ends the conversation.
    """
    params = _sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    drafts = engine.settings()["speculative"] is not None
    llm = engine.build(model, max_num_seqs=16 if drafts else 1)  # a draft takes a row of the batch
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> ")
        except EOFError:
            break
        if not line.strip():
            break
        question = {"role": "user", "content": line}
        try:
            answer = print_stream(llm.stream(llm.chat_prompt([*messages, question]), params))
        except ValueError as error:
            typer.secho(f"refused: {error}", fg="red", err=True)
            continue
        messages += [question, {"role": "assistant", "content": answer}]


@app.command(epilog=examples("convert"))
@with_engine_options(("dtype", "quantization"))
def convert(
    source: Annotated[str, typer.Argument(help="Alias, hub id, Hugging Face folder or .gguf file.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist yet.")],
    *,
    engine: EngineOptions,
) -> None:
    """Write a model as a checkpoint that loads faster.

    It is a folder of Orbax's, with config and tokenizer, and the weights in the form in which the engine holds them.
    """
    from jpaged.loading import convert_checkpoint

    with bad_parameters():
        convert_checkpoint(source, target, **engine.settings())
    typer.echo(f"wrote {target}")


app.command(epilog=examples("serve"))(serve)
app.command("run-batch", epilog=examples("run-batch"))(run_batch)
app.command(epilog=examples("plan"))(plan)
app.command("compile", epilog=examples("compile"))(compile_model)
app.add_typer(bench, name="bench")


def _lines(file: Path) -> list[str]:
    """Return the lines of a file that are not empty; only a line feed, or one behind a carriage return, ends a line."""
    try:
        lines = (line.removesuffix("\r") for line in file.read_bytes().decode("utf-8").split("\n"))
        return [line for line in lines if line]
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{file} is not UTF-8: {error}") from error


def _sampling(**values: Any) -> Any:
    from jpaged.sampling_params import SamplingParams

    with bad_parameters():
        return SamplingParams(**values)


def run() -> None:
    """Run the command line in a process of its own.

    Where PyTorch is installed, transformers imports all of it, which takes seconds and serves nothing here: the process
    is told that it is not there. Measurements against PyTorch keep it.
    """
    if sys.argv[1:2] != ["bench"]:
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    app()


if __name__ == "__main__":
    run()
