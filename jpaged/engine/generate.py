"""Generates in the caller's thread: runs a batch to its end, or streams deltas."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from typing import Literal, NamedTuple

from jpaged.engine.engine import Engine
from jpaged.engine.progress import GenerationProgress, compilation_notes
from jpaged.errors import GenerationInterrupted
from jpaged.outputs import CompletionOutput, RequestOutput, StreamDelta
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.scheduling import Request, Status
from jpaged.text.adapters import LoRA
from jpaged.text.input_processor import InputProcessor
from jpaged.text.output_processor import OutputProcessor, refused
from jpaged.text.prompt import DEFAULT, Conversation, Prompt, Tokenization
from jpaged.text.token_reader import TokenReader
from jpaged.validation import boolean

OnError = Literal["raise", "return"]


class Batch(NamedTuple):
    """Prompts to run together, with the arguments of each.

    Attributes:
        prompts: prompts or conversations.
        params: one for each prompt.
        priorities: one for each prompt, lower is served first; None = all are equal.
        tokenization: how texts become tokens.
        loras: the adapter of each prompt, or None; None = no prompt has one.
        prefill_only: see `InputProcessor.process`.
    """

    prompts: Sequence[Prompt | Conversation]
    params: Sequence[SamplingParams | BeamSearchParams]
    priorities: Sequence[int | None] | None = None
    tokenization: Tokenization = DEFAULT
    loras: Sequence[LoRA | None] | None = None
    prefill_only: bool = False

    def request(self, i: int, inputs: InputProcessor, *, streamed: bool = False) -> Request:
        """Return the request for one prompt.

        Raises:
            ValueError: the prompt or one of its arguments is bad.
        """
        return inputs.process(
            self.prompts[i],
            self.params[i],
            None if self.priorities is None else self.priorities[i],
            streamed=streamed,
            tokenization=self.tokenization,
            lora=None if self.loras is None else self.loras[i],
            prefill_only=self.prefill_only,
        )


def generate(
    engine: Engine,
    inputs: InputProcessor,
    outputs: OutputProcessor,
    batch: Batch,
    use_tqdm: bool,
    on_error: OnError = "raise",
) -> list[RequestOutput]:
    """Run a batch to its end and return one output for each prompt; see `LLM.generate`."""
    boolean("use_tqdm", use_tqdm)
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error={on_error!r} is not 'raise' or 'return'")

    def refuse(number: int, error: ValueError) -> RequestOutput:
        if on_error == "raise":
            raise ValueError(f"prompt {number}: {error}") from error
        return refused(batch.prompts[number], str(error))

    entries: list[Request | RequestOutput] = []
    for i in range(len(batch.prompts)):
        try:
            entries.append(batch.request(i, inputs))
        except ValueError as error:
            entries.append(refuse(i, error))
    requests = [entry for entry in entries if isinstance(entry, Request)]
    with engine.lock:
        engine.check_available()
        try:
            for i, entry in enumerate(entries):
                if isinstance(entry, Request):
                    try:
                        engine.add(entry)
                    except ValueError as error:
                        entries[i] = refuse(i, error)
            run_to_end(engine, [entry for entry in entries if isinstance(entry, Request)], use_tqdm)
        except KeyboardInterrupt as interrupt:
            engine.abort(*requests)
            raise GenerationInterrupted(
                [_so_far(entry, outputs, prompt) for entry, prompt in zip(entries, batch.prompts, strict=True)]
            ) from interrupt
        finally:
            engine.abort(*requests)  # nothing stays in the engine if a prompt was refused or the user interrupted
    return [outputs.whole(entry) if isinstance(entry, Request) else entry for entry in entries]


def _so_far(entry: Request | RequestOutput, outputs: OutputProcessor, prompt: Prompt | Conversation) -> RequestOutput:
    """Return the output of a request that was aborted or has ended."""
    if isinstance(entry, RequestOutput):
        return entry
    if any(part.status is not Status.FINISHED for part in entry.all_requests):
        return refused(prompt, "interrupted before it began")
    return outputs.whole(entry)


def resume(engine: Engine, outputs: OutputProcessor, use_tqdm: bool) -> list[RequestOutput]:
    """Run the requests of a loaded state to their ends; see `LLM.resume`."""
    boolean("use_tqdm", use_tqdm)
    with engine.lock:
        engine.check_available()
        requests = list(engine.requests.restored.values())
        run_to_end(engine, requests, use_tqdm)
        engine.abort(*requests)  # no other caller reads them
    return [outputs.whole(request, request.name or str(request.request_id)) for request in requests]


def stream(
    engine: Engine, inputs: InputProcessor, outputs: OutputProcessor, batch: Batch
) -> Generator[StreamDelta, None, None]:
    """Check a batch at once and return a generator of its new text and tokens; see `LLM.stream`."""
    requests = []
    for i, param in enumerate(batch.params):
        try:
            requests.append(batch.request(i, inputs, streamed=True))
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from error
        if isinstance(param, SamplingParams) and param.prompt_logprobs is not None:
            raise ValueError(f"prompt {i}: prompt_logprobs={param.prompt_logprobs}: deltas have no place for them")
    return _deltas(engine, outputs, requests)


def _deltas(engine: Engine, outputs: OutputProcessor, requests: list[Request]) -> Generator[StreamDelta, None, None]:
    """Yield the new tokens of some requests; closing the generator aborts those that still run.

    Each step takes the engine's lock anew, so that other threads can run between two deltas.
    """
    try:
        with engine.lock:
            engine.check_available()
            for request in requests:
                engine.add(request)
        readers = [TokenReader(request) for request in requests]
        builders = [outputs.builder(request) for request in requests]
        while not all(reader.done for reader in readers):
            with engine.lock:
                engine.step()
                news = [reader.read() for reader in readers]
            for i, (progress, builder) in enumerate(zip(news, builders, strict=True)):
                if progress is not None:
                    builder.add(progress)
                    yield from (_stream_delta(i, output) for output in builder.delta().outputs)
    finally:
        engine.drop(requests)


def _stream_delta(prompt_index: int, output: CompletionOutput) -> StreamDelta:
    return StreamDelta(
        prompt_index=prompt_index,
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        logprobs=output.logprobs,
        added_token_spans=output.added_token_spans,
    )


def run_to_end(engine: Engine, requests: list[Request], show: bool) -> None:
    """Run requests to their ends.

    Args:
        show: whether a bar shows the progress.
    """
    unfinished = {
        part.request_id: request
        for request in requests
        for part in request.all_requests
        if part.status is not Status.FINISHED
    }
    missing = Counter(request.request_id for request in unfinished.values())
    compilations = engine.runner.worker.compilations
    bar = (
        GenerationProgress(requests, len(missing), engine.stats, compiling=compilations.activity)
        if show
        else nullcontext()
    )
    # A bar moves on a terminal only; elsewhere lines tell of programs.
    notes = compilation_notes(compilations) if show and not sys.stderr.isatty() else nullcontext()
    with notes, bar as progress:
        while unfinished:
            ended = []
            for part in engine.step():
                if (request := unfinished.pop(part.request_id, None)) is not None:
                    missing[request.request_id] -= 1
                    ended += [] if missing[request.request_id] else [request]
            if not any(key in engine.requests.unfinished for key in unfinished):
                # Another caller of `step` took the finished requests, such as a signal's handler that generated.
                ended += dict.fromkeys(unfinished.values())
                unfinished.clear()
            if progress is not None:
                progress.update(len(ended))
