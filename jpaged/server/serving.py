"""The state that all endpoints share, and the way of each request to the engine and back."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from fastapi import Request

from jpaged import AsyncLLM, BeamSearchParams, RequestOutput, RequestOutputKind, SamplingParams
from jpaged.answers.bound import hidden_tokens
from jpaged.image_sources import MediaUrl, decoded_once
from jpaged.server.cache_use import CacheUse
from jpaged.server.caller import Caller, caller_of
from jpaged.server.errors import ApiError, shortened
from jpaged.server.fair_queue import FairQueue
from jpaged.server.logs import PromptLog
from jpaged.server.messages.answer_reader import AnswerReader
from jpaged.server.messages.kept_grammars import KeptGrammars
from jpaged.server.messages.system_messages import SystemMessages
from jpaged.server.messages.turn_form import Bound, TurnForm, bound_to
from jpaged.server.metrics import RequestTimes, ServerMetrics
from jpaged.server.settings import ServerSettings
from jpaged.server.tracing import Traces
from jpaged.server.turn import Step, Turn

MOST_TOKENS = 2**17
"""Limit on the tokens of a text that is only counted, or eight times `max_model_len`, where that is more."""


class Serving:
    """One engine behind HTTP. Used from the event loop only.

    Args:
        engine: may have other callers in the process.
        settings: see `ServerSettings`.
        traces: records a span for each request; None: no spans.

    Attributes:
        created: start of the server, in seconds since 1970.
        draining: whether the server is about to end and refuses new requests.
        queue: requests that wait for a place at the engine, by key.
        num_active: POST requests in progress.
        on_finished: called with each whole output of the engine; None: nothing is.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, traces: Traces | None = None) -> None:
        self.engine = engine
        clash = sorted(set(settings.names) & set(engine.adapters))
        if clash:
            raise ValueError(f"lora_modules has {clash[0]!r}, which is also a name of the model: rename one of them")
        self._traces = traces
        self.settings = settings
        self.metrics = ServerMetrics(engine, settings.model)
        self.created = int(time.time())
        self.draining = False
        self.num_active = 0
        self.on_finished: Callable[[RequestOutput], None] | None = None
        places = engine.config.max_num_seqs * engine.config.data_parallel_size
        self.queue = FairQueue(settings.keys, places=places + max(4, places // 4), max_waiting=settings.max_waiting)
        self._names: set[str] = set()
        self._system_messages = SystemMessages()
        self._grammars = KeptGrammars()
        self._closed = False

    @cached_property
    def _bound(self) -> Bound:
        """Return what makes the formats of the model's answers, each once, see `TurnForm`."""
        return cache(bound_to(self.engine.tokenizer))

    @cached_property
    def hidden_tokens(self) -> frozenset[int]:
        """Return the tokens that a text without special tokens lacks."""
        return hidden_tokens(self.engine.tokenizer)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model, of which some may be patterns, and those of its adapters."""
        return (*self.settings.names, *self.engine.adapters)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request's `model` names; None: the model without an adapter."""
        return model if model in self.engine.adapters else None

    def check_parts(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Check that messages have features of images only where the server takes them.

        Raises:
            ApiError: they have, and it does not.
        """
        if self.settings.enable_mm_embeds:
            return
        for i, message in enumerate(messages):
            parts = message.get("content")
            for k, part in enumerate(parts if isinstance(parts, list) else ()):
                if part.get("type") == "image_embeds":
                    where = f"messages.{i}.content.{k}"
                    message_ = f"{where} has features of images, which need a server with --enable-mm-embeds"
                    raise ApiError(message_, param=where, code="invalid_value")

    def check_model(self, model: str | None) -> None:
        """Check that the server has a model; None stands for its only one.

        Raises:
            ApiError: 404.
        """
        if model is None or model in self.engine.adapters or self.settings.has(model):
            return
        message = f"The model `{shortened(model)}` does not exist; this server has {', '.join(self.names)}"
        raise ApiError(message, status=404, param="model", code="model_not_found")

    async def cut_off(self) -> None:
        """End all running requests with their output so far and finish_reason "abort", and refuse those that have not
        begun."""
        self._closed = True
        for name in list(self._names):
            await self.engine.abort(name)

    def not_honoured(self, unhonoured: Mapping[str, str]) -> dict[str, Any]:
        """Return the field of an answer that names the request's fields that are accepted but not honoured.

        Raises:
            ApiError: there is one, and the server refuses them (``--strict-fields``).
        """
        if unhonoured and self.settings.strict_fields:
            path, reason = next(iter(unhonoured.items()))
            raise ApiError(f"{path} is not supported: {reason}", param=path, code="unsupported_parameter")
        return {"not_honoured": dict(unhonoured)} if unhonoured else {}

    def begin(self, request: Request) -> Caller:
        """Return the caller of a request, with its deadline.

        Raises:
            ApiError: the server is draining.
        """
        if self.draining:
            raise _shutting_down()
        caller = caller_of(request)
        caller.ping_interval = self.settings.ping_interval
        if self.settings.request_timeout is not None:
            caller.deadline = asyncio.get_running_loop().time() + self.settings.request_timeout
        return caller

    async def generate(
        self,
        prompt: Mapping[str, Any],
        params: SamplingParams | BeamSearchParams,
        caller: Caller,
        *,
        model: str | None = None,
        priority: int | None = None,
        add_special_tokens: bool | None = None,
        prompt_only: bool = False,
        refusal: Callable[[Exception], ApiError],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one prompt with the adapter that `model` names, and record metrics, log and trace.

        Closing the generator frees the request's memory.

        Args:
            prompt_only: see `AsyncLLM.generate`.
            refusal: makes the error for a value that the engine refuses; see `SamplingFields.refusal`.

        Raises:
            ApiError: the engine refuses the prompt or a parameter, the queue is full, or a request with the same
                Idempotency-Key runs.
        """
        prompt = {**prompt, "cache_salt": caller.salted(prompt.get("cache_salt"))}
        adapter = self.adapter_of(model)
        name = caller.engine_name(prompt, params, adapter)
        if name in self._names:
            message = "a request with this Idempotency-Key is running, and its answer goes to its first caller"
            raise ApiError(message, status=409, code="idempotency_conflict")
        self._names.add(name)
        seen = _Progress()
        deltas = isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        log = PromptLog(caller, prompt, deltas=deltas) if self.settings.log_prompts else None
        try:
            async with (
                self.queue.place(caller.key),
                aclosing(
                    self._outputs(name, prompt, params, adapter, priority, add_special_tokens, prompt_only, caller.take)
                ) as outputs,
            ):
                async for output in outputs:
                    self._count(output, params, caller, seen)
                    if log is not None:
                        log.add(output)
                    yield output
        except ValueError as error:  # the engine refuses the prompt or a parameter
            seen.fail(error)
            raise refusal(error) from error
        except Exception as error:
            seen.fail(error)
            raise
        finally:
            self._names.discard(name)
            if log is not None:
                log.write()
            if self._traces is not None:
                self._traces.record(caller, params, seen.last, seen.times.num_tokens.total(), seen.failure)

    def form_of(self, turn: Turn) -> TurnForm:
        """Return a turn with the server's model.

        Raises:
            ApiError: the turn needs a feature that the server or the model lacks.
        """
        return TurnForm(
            turn,
            self.engine.tokenizer,
            tool_parser=self.settings.tool_parser,
            reasoning_parser=self.settings.reasoning_parser,
            grammars=self._grammars,
            bound=self._bound,
        )

    async def rendered(self, form: TurnForm, *, counts: bool = False) -> Mapping[str, Any]:
        """Return the prompt of a conversation's next turn.

        Args:
            counts: whether the prompt may have more tokens than the model takes.

        Raises:
            ApiError: the conversation does not fit the chat template, or the model.
        """
        turn = form.turn
        self.check_parts(turn.messages)
        try:
            messages = turn.messages
            if turn.moves_system:
                messages = await asyncio.to_thread(self._system_messages.placed, messages, self.engine.chat_prompt)
            if turn.drops_oldest:
                return await asyncio.to_thread(self._newest, messages, **form.template_options())
            options = {"truncate_prompt_tokens": turn.last_tokens, **form.template_options()}
            if counts:
                options["max_tokens"] = max(MOST_TOKENS, 8 * self.engine.max_model_len)
            elif turn.marked:
                place = self._system_messages.placed if turn.moves_system else lambda messages, render: messages
                options["marked_prefixes"] = [
                    (place(one.messages, self.engine.chat_prompt), one.seconds) for one in turn.marked
                ]
            return await asyncio.to_thread(self.engine.chat_prompt, messages, **options)
        except ValueError as error:
            raise turn.names.refusal(error) from error

    async def answer(self, form: TurnForm, caller: Caller) -> AsyncGenerator[Step, None]:
        """Return what the model adds to the answers as it comes; the engine begins when the first is awaited.

        Raises:
            ApiError: the conversation does not fit the chat template, or a field is refused.
        """
        turn, made = form.turn, await self.rendered(form)
        form.follow(made["prompt"])
        params = await form.params_made_in_thread()
        prompt: Mapping[str, Any] = made if turn.cache_salt is None else {**made, "cache_salt": turn.cache_salt}
        return _steps(
            form,
            self.generate(prompt, params, caller, model=turn.model, priority=turn.priority, refusal=turn.names.refusal),
        )

    def _newest(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Return the prompt of a conversation's newest messages that fit, which begin with one of the user.

        System messages at the beginning stay. A quarter of the context is left for the answer.
        """
        messages = _keeping_media(messages)  # each rendering reads them
        with decoded_once():
            return self._cut_to_fit(messages, **options)

    def _cut_to_fit(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        num_system = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
        room = self.engine.max_model_len - self.engine.max_model_len // 4
        begins = [i for i in range(num_system, len(messages)) if messages[i]["role"] == "user" or i == num_system]

        def render(begin: int, cut: int | None = None) -> Any:
            kept = [*messages[:num_system], *messages[begin:]]
            return self.engine.chat_prompt(kept, truncate_prompt_tokens=cut, **options)

        def fits(begin: int) -> bool:  # one token too many is enough to know
            try:
                return len(render(begin, room + 1)["prompt_token_ids"]) <= room
            except ValueError:  # far too long, or refused for what the last rendering will be refused for too
                return False

        if len(begins) < 2 or fits(num_system):
            return render(num_system)
        last = len(begins) - 1
        first = bisect_left(range(last), True, lo=1, key=lambda i: fits(begins[i]))
        return render(begins[first])

    def _count(
        self, output: RequestOutput, params: SamplingParams | BeamSearchParams, caller: Caller, seen: _Progress
    ) -> None:
        seen.last = output
        seen.times.count(output)
        if isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA:
            self.metrics.streamed(seen.times)
        if output.finished:
            seen.failure = None
            self.metrics.finished(output, seen.times, caller.arrived)
            if self.on_finished is not None:
                self.on_finished(output)
            caller.count(output, seen.times.num_tokens.total())

    async def _outputs(
        self,
        name: str,
        prompt: Mapping[str, Any],
        params: SamplingParams | BeamSearchParams,
        adapter: str | None,
        priority: int | None,
        add_special_tokens: bool | None,
        prompt_only: bool,
        taken: Callable[[], None],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the engine's outputs for one prompt, or those of a restored request.

        Args:
            taken: called once the engine has taken the request.
        """
        if self._closed:
            raise _shutting_down()
        restored = name in self.engine.restored_requests
        if isinstance(params, BeamSearchParams) and not restored:
            yield await self.engine.beam_search(prompt, params, name, lora_request=adapter, priority=priority)
            return
        tokenization = None if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if restored:
            taken()
            outputs = self.engine.resume(name, None if isinstance(params, BeamSearchParams) else params.output_kind)
        else:
            assert isinstance(params, SamplingParams)
            outputs = self.engine.generate(
                prompt,
                params,
                name,
                lora_request=adapter,
                priority=priority,
                tokenization_kwargs=tokenization,
                taken=taken,
                **({"prompt_only": True} if prompt_only else {}),
            )
        async with aclosing(outputs):
            async for output in outputs:
                yield output


def _keeping_media(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with each URL of an image or a video as a `MediaUrl`."""

    def part(given: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = given.get("type")
        if kind not in ("image_url", "video_url"):
            return given
        return {**given, kind: {**given[kind], "url": MediaUrl.of(given[kind]["url"])}}

    contents = [message.get("content") for message in messages]
    return [
        {**message, "content": [part(each) for each in content]} if isinstance(content, list) else message
        for message, content in zip(messages, contents, strict=True)
    ]


def serving_of(request: Request) -> Serving:
    """Return the state that the app's endpoints share."""
    return request.app.state.serving


@dataclass
class _Progress:
    """The progress of one request.

    Attributes:
        failure: the reason for an early end; before the end of the request, that its client disconnected.
    """

    last: RequestOutput | None = None
    times: RequestTimes = field(default_factory=RequestTimes)
    failure: str | None = "the client went away"

    def fail(self, error: Exception) -> None:
        """Record an error by its type only, since its message may repeat the prompt."""
        self.failure = type(error).__name__


def _shutting_down() -> ApiError:
    return ApiError("the server is shutting down", status=503, code="draining", headers={"Retry-After": "5"})


Outputs = AsyncGenerator[RequestOutput, None]


async def _steps(form: TurnForm, outputs: Outputs) -> AsyncGenerator[Step, None]:
    """Yield a turn's answers of the engine's outputs. Closing ends the request."""
    readers: dict[int, AnswerReader] = {}
    async with aclosing(outputs):
        async for output in outputs:
            pieces = []
            for one in output.outputs:
                if one.index not in readers:
                    readers[one.index] = form.answer_reader()
                pieces.append(readers[one.index].read(output, one))
            yield Step(
                output.prompt_token_ids, output.num_cached_tokens, output.prompt_logprobs, pieces, CacheUse.of(output)
            )


async def merged(each: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of several prompts as they come, each with its prompt's number. Closing ends them all."""
    if len(each) == 1:
        async with aclosing(each[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=2 * len(each))

    async def pump(number: int, outputs: Outputs) -> None:
        end: Exception | None = None
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    await queue.put((number, output))
        except Exception as error:
            end = error
        await queue.put((number, end))

    tasks = [asyncio.create_task(pump(i, outputs)) for i, outputs in enumerate(each)]
    try:
        left = len(each)
        while left:
            prompt, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield prompt, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collected(each: Sequence[Outputs]) -> list[RequestOutput]:
    """Return the final outputs of several prompts, in order."""
    final: dict[int, RequestOutput] = {}
    async with aclosing(merged(each)) as outputs:
        async for number, output in outputs:
            final[number] = output
    return [final[i] for i in range(len(each))]
