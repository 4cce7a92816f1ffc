"""Has the command ``jpaged run-batch``: a file of requests in OpenAI's batch format."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

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
    Model,
    PreemptionMode,
    PrefixEviction,
    Quantization,
    Speculative,
    TensorParallel,
    bad_parameters,
    build_llm,
    check_serve_extra,
)


def run_batch(
    requests_file: Annotated[Path, typer.Argument(metavar="IN", exists=True, dir_okay=False, help="A request a line.")],
    answers_file: Annotated[Path, typer.Argument(metavar="OUT", dir_okay=False, help="Gets an answer a line.")],
    model: Model = "smollm2-135m",
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in requests; default: MODEL.")] = (
        None
    ),
    tool_parser: Annotated[str | None, typer.Option(help="Form of tool calls: hermes, llama3 or mistral.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="think tells <think>...</think> apart.")] = None,
    download_dir: DownloadDir = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KVCacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    max_num_seqs: MaxNumSeqs = 64,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    kv_cache_memory_bytes: KVBytes = None,
    preemption_mode: PreemptionMode = "recompute",
    prefix_eviction: PrefixEviction = "aligned",
    speculative: Speculative = None,
    tensor_parallel_size: TensorParallel = 1,
    enable_expert_parallel: ExpertParallel = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Started again after it was killed it asks only what OUT has no answer for. Exits with 1 where a request was refused.
    """
    check_serve_extra()
    from jpaged.server import batch
    from jpaged.server.settings import ServerSettings

    with bad_parameters():
        asked = batch.read_requests(requests_file)
        done = batch.answered(answers_file)
        settings = ServerSettings(
            model=served_model_name or model,
            max_waiting=max(256, 2 * max_num_seqs),
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
    left = [request for request in asked if request.custom_id not in done]
    typer.echo(f"{len(asked)} requests, {len(asked) - len(left)} answered before", err=True)
    if not left:
        return
    llm = build_llm(
        model,
        download_dir=download_dir,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        preemption_mode=preemption_mode,
        prefix_eviction=prefix_eviction,
        speculative=speculative,
        tensor_parallel_size=tensor_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
    )
    failed = asyncio.run(_answer(llm, settings, left, answers_file, 2 * max_num_seqs))
    if failed:
        typer.echo(f"{failed} requests were refused or failed; {answers_file} says why", err=True)
        raise typer.Exit(1)


async def _answer(llm: Any, settings: Any, left: Any, answers_file: Path, concurrency: int) -> int:
    from jpaged import AsyncLLM
    from jpaged.server.app import create_app
    from jpaged.server.batch import run_batch as run

    async with AsyncLLM.from_llm(llm, max_waiting_requests=settings.max_waiting) as engine:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("requests", total=len(left))
            app = create_app(engine, settings)
            return await run(app, left, answers_file, concurrency=concurrency, advance=lambda: progress.advance(task))
