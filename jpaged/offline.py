"""Driving an engine from the caller's thread: a batch to its end, or a stream of what is new."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Literal

from jpaged.beam_search_params import BeamSearchParams
from jpaged.engine import Engine
from jpaged.outputs import RequestOutput, StreamDelta
from jpaged.progress import GenerationProgress
from jpaged.prompts import Conversation, Prompt, make_request, refused
from jpaged.results import DeltaReader, request_output
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request

OnError = Literal["raise", "return"]


def answer(
    engine: Engine,
    tokenizer: Any,
    batch: Sequence[Prompt | Conversation],
    params: Sequence[SamplingParams | BeamSearchParams],
    ranks: Sequence[int | None],
    use_tqdm: bool,
    on_error: OnError,
) -> list[RequestOutput]:
    """Run a batch to its end; one output a prompt, see `LLM.generate`."""
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error={on_error!r} is not 'raise' or 'return'")
    entries: list[Request | RequestOutput] = []
    queued: list[Request] = []
    try:
        for prompt, param, rank in zip(batch, params, ranks, strict=True):
            try:
                request = make_request(engine, tokenizer, prompt, param, rank)
                engine.add(request)
                queued.append(request)
                entries.append(request)
            except ValueError as error:
                if on_error == "raise":
                    raise ValueError(f"prompt {len(entries)}: {error}") from error
                entries.append(refused(prompt, str(error)))
        _run(engine, queued, use_tqdm)
    finally:
        for request in queued:  # leaves nothing behind when a prompt was refused or the user interrupted
            engine.abort(request)
        engine.drain()
    return [request_output(e, tokenizer) if isinstance(e, Request) else e for e in entries]


def stream(
    engine: Engine,
    tokenizer: Any,
    batch: Sequence[Prompt],
    params: Sequence[SamplingParams],
    ranks: Sequence[int | None],
) -> Generator[StreamDelta, None, None]:
    """Check a batch, then give what is new as it comes, see `LLM.stream`."""
    requests = []
    for i, (prompt, param, rank) in enumerate(zip(batch, params, ranks, strict=True)):
        try:
            requests.append(make_request(engine, tokenizer, prompt, param, rank, streamed=True))
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from error
        if param.prompt_logprobs is not None:
            raise ValueError(f"prompt {i}: prompt_logprobs={param.prompt_logprobs}: deltas have no place for them")
    return _deltas(engine, tokenizer, requests)


def _deltas(engine: Engine, tokenizer: Any, requests: list[Request]) -> Generator[StreamDelta, None, None]:
    """What is new of the requests; closing the generator aborts what still runs."""
    queued: list[Request] = []
    try:
        for request in requests:
            engine.add(request)
            queued.append(request)
        readers = [DeltaReader(request, tokenizer, i) for i, request in enumerate(requests)]
        while readers:
            engine.step()
            for reader in readers:
                yield from reader.read()
            readers = [reader for reader in readers if not reader.done]
    finally:
        for request in queued:
            engine.abort(request)
        engine.drain()


def _run(engine: Engine, requests: list[Request], show: bool) -> None:
    unfinished = {request.request_id for request in requests}
    with GenerationProgress(len(requests), show) as progress:
        while unfinished:
            finished = [request for request in engine.step() if request.request_id in unfinished]
            unfinished.difference_update(request.request_id for request in finished)
            progress.update(finished, engine.stats)
