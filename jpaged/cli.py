"""The command line: ``jpaged generate|chat|convert|bench``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    help="Serve large language models from JAX with paged KV memory.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(help="Measure the engine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Model = Annotated[
    str,
    typer.Option(help="Alias (smollm2-135m), hub id, Hugging Face folder, .gguf file or saved checkpoint."),
]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Most tokens of a sequence; default 2048 or the model's limit.")
]
BlockSize = Annotated[int, typer.Option(min=8, help="Tokens a KV block.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Sequences that run at once.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(min=1, help="Token budget of a step.")]
KVBytes = Annotated[int | None, typer.Option(min=1, help="Bytes of the KV pool on each device; default: what is free.")]
PreemptionMode = Annotated[str, typer.Option(help="How preempted requests come back: recompute, swap or auto.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Devices to shard heads, MLP and vocabulary over.")]
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


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; or use --file.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, help="A file with one prompt a line.")] = None,
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
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    kv_cache_memory_bytes: KVBytes = None,
    preemption_mode: PreemptionMode = "recompute",
    tensor_parallel_size: TensorParallel = 1,
    stream: Annotated[bool, typer.Option(help="Print the text of a single prompt as it comes.")] = False,
    memory: Annotated[bool, typer.Option(help="Print the memory table afterwards.")] = False,
) -> None:
    """Complete one or many prompts in one batch and print the texts."""
    texts = list(prompts or [])
    if file is not None:
        texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line]
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
    llm = _llm(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        preemption_mode=preemption_mode,
        tensor_parallel_size=tensor_parallel_size,
    )
    console = Console(highlight=False)
    if stream:
        console.print(texts[0], style="bold", end="", markup=False)
        with _bad_parameters():
            _print_stream(llm, texts[0], params)
    outputs = [] if stream else llm.generate(texts, params, on_error="return")
    for output in outputs:
        if output.error is not None:
            console.rule(style="dim")
            console.print(output.prompt, style="bold", markup=False)
            console.print(f"refused: {output.error}", style="red", markup=False)
        for completion in output.outputs:
            console.rule(style="dim")
            console.print(output.prompt, style="bold", end="", markup=False)
            console.print(completion.text, markup=False)
    if memory:
        console.print(str(llm.memory_report()), markup=False)
    if any(output.error is not None for output in outputs):
        raise typer.Exit(1)


@app.command()
def chat(
    model: Model = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    tensor_parallel_size: TensorParallel = 1,
) -> None:
    """Talk to a model, one turn at a time; an empty line or end of input ends the conversation."""
    params = _sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    llm = _llm(
        model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=1, tensor_parallel_size=tensor_parallel_size
    )
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("> ")
        except EOFError:
            break
        if not line.strip():
            break
        messages.append({"role": "user", "content": line})
        with _bad_parameters():
            answer = _print_stream(llm, llm.chat_prompt(messages), params)
        messages.append({"role": "assistant", "content": answer})


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Alias, hub id, Hugging Face folder or .gguf file.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist yet.")],
    dtype: Dtype = "auto",
) -> None:
    """Write a model as an Orbax checkpoint, which loads faster than its source."""
    from jpaged.loading import convert_checkpoint

    with _bad_parameters():
        convert_checkpoint(source, target, dtype=dtype)
    typer.echo(f"wrote {target}")


@bench.command()
def throughput(
    model: Model = "smollm2-135m",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, all sent at once.")] = 64,
    mean_input: Annotated[float, typer.Option(min=1, help="Mean prompt tokens (lognormal).")] = 160,
    mean_output: Annotated[float, typer.Option(min=1, help="Mean output tokens (lognormal).")] = 64,
    sigma: Annotated[float, typer.Option(min=0, help="Standard deviation of the lengths' logarithm.")] = 0.5,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths and prompts.")] = 0,
    dtype: Dtype = "float32",
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    block_size: BlockSize = 16,
    kv_cache_memory_bytes: KVBytes = None,
    preemption_mode: PreemptionMode = "recompute",
    tensor_parallel_size: TensorParallel = 1,
) -> None:
    """Output tokens/s of a batch and of one sequence, against this machine's own matrix products and memory."""
    from jpaged.benchmarks.prompts import Lengths
    from jpaged.benchmarks.throughput import run

    llm = _llm(
        model,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        preemption_mode=preemption_mode,
        tensor_parallel_size=tensor_parallel_size,
    )
    llm.warmup()
    typer.echo(str(run(llm, Lengths(num_prompts, mean_input, mean_output, sigma, seed))))


@bench.command()
def sharing(
    model: Model = "smollm2-135m",
    examples: Annotated[
        Path | None, typer.Option(help="JSON lines of en and de: translations to ask for; else GSM8K's questions.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of several outputs; twice as many otherwise.")] = 4,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each of several outputs.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and draws.")] = 0,
    docs: Annotated[Path | None, typer.Option(help="Folder for sharing.md and sharing.png (needs matplotlib).")] = None,
) -> None:
    """What sharing saves: samples and beams of a prompt, shared prefixes, swapping against recomputation."""
    from jpaged.benchmarks import sharing_report
    from jpaged.benchmarks.prompts import questions, translations

    pairs = translations(examples) if examples is not None else questions()
    text, outputs, prefixes, returned = sharing_report.run(
        model, pairs, num_prompts=num_prompts, output_tokens=output_tokens, seed=seed, say=typer.echo
    )
    typer.echo(text)
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        sharing_report.plot(outputs, prefixes, returned, docs / "sharing.png")
        (docs / "sharing.md").write_text(sharing_report.page(text, model), encoding="utf-8")


@bench.command()
def memory(
    trace: Annotated[
        list[Path] | None, typer.Option(exists=True, help="CSV of prompt_len, output_len: chats; may be repeated.")
    ] = None,
    long: Annotated[
        Path | None, typer.Option(exists=True, help="The same, of long prompts, for models whose layers differ.")
    ] = None,
    conversations: Annotated[
        Path | None, typer.Option(exists=True, help="The same with hash_ids, for prefix caching.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=10, help="Requests of a run; four times as many chats.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths that are drawn where no file is given.")] = 0,
    docs: Annotated[Path | None, typer.Option(help="Folder for memory.md and memory.png (needs matplotlib).")] = None,
) -> None:
    """Where KV memory goes: jpaged's allocator and five others, simulated on published model shapes."""
    from jpaged.benchmarks import memory_report
    from jpaged.benchmarks.memory_traces import draw_conversations, draw_lengths, read_trace

    with _bad_parameters():
        chats = {path.stem: read_trace(path, 4 * num_requests) for path in trace or []}
        far = read_trace(long, num_requests // 2) if long else draw_lengths(8000, 300, num_requests // 2, seed)
        talks = read_trace(conversations, num_requests) if conversations else draw_conversations(num_requests, seed)
    sources = [*chats, long.stem if long else "drawn long prompts"]
    sources.append(conversations.stem if conversations else "drawn conversations")
    if not chats:
        chats = {"drawn chats": draw_lengths(300, 320, 4 * num_requests, seed)}
        sources.insert(0, "drawn chats")
    results = memory_report.run(chats, far, talks, say=typer.echo)
    text = memory_report.tables(results)
    typer.echo(text)
    if docs is not None:
        docs.mkdir(parents=True, exist_ok=True)
        memory_report.plot(results, docs / "memory.png")
        (docs / "memory.md").write_text(memory_report.page(text, sources), encoding="utf-8")


@contextmanager
def _bad_parameters() -> Iterator[None]:
    """What the engine refuses, told as the command line tells it."""
    try:
        yield
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error


def _llm(model: str, **settings: Any) -> Any:
    from jpaged.llm import LLM

    with _bad_parameters():
        return LLM(model, **settings)


def _print_stream(llm: Any, prompt: Any, params: Any) -> str:
    """Print the text as it comes; returns all of it."""
    pieces = []
    for delta in llm.stream(prompt, params):
        pieces.append(delta.text)
        typer.echo(delta.text, nl=False)
    typer.echo()
    return "".join(pieces)


def _sampling(**values: Any) -> Any:
    from jpaged.sampling_params import SamplingParams

    with _bad_parameters():
        return SamplingParams(**values)


if __name__ == "__main__":
    app()
