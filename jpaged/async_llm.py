"""The public API for servers: many clients, one engine, asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack

from jpaged.config import SizedConfig
from jpaged.engine.async_handle import AsyncHandle
from jpaged.engine.process import refuse_pickling
from jpaged.engine.thread import EngineThread
from jpaged.engine.ticket import Ticket
from jpaged.llm import LLM
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jpaged.text.adapters import LoRA, one_lora_each
from jpaged.text.batch import one_each, priorities
from jpaged.text.chat_template import ChatArguments, Messages
from jpaged.text.output_processor import OutputBuilder
from jpaged.text.prompt import DEFAULT, Prompt, Tokenization
from jpaged.text.token_reader import TokenReader
from jpaged.validation import integer

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine
    from jpaged.training import TrainableModel

T = TypeVar("T")
_GRAMMAR_THREADS = 2
"""Threads that make requests with structured_outputs, so that slow grammars leave all others to plain requests."""


class AsyncLLM(AsyncHandle):
    """An `LLM` whose engine runs in a thread of its own, for any number of asyncio clients.

    >>> async with AsyncLLM("smollm2-135m") as engine:                       # doctest: +SKIP
    ...     async for output in engine.generate("Once", SamplingParams(), "request-1"):
    ...         print(output.outputs[0].text)

    Args:
        model, settings: as of `LLM`.
        max_waiting_requests: most requests that wait for admission; beyond, `generate` raises EngineBusy. Requests are
            admitted between steps: of those that come at one moment, all wait.
    """

    _owns = False

    def __init__(self, model: str | Path, *, max_waiting_requests: int = 256, **settings: Any) -> None:
        max_waiting_requests = integer("max_waiting_requests", max_waiting_requests, low=1)
        self._start(LLM(model, **settings), max_waiting_requests)
        self._owns = True

    @classmethod
    def from_llm(cls, llm: LLM, *, max_waiting_requests: int = 256) -> AsyncLLM:
        """Run the engine of an LLM, say one that is warmed up; until `shutdown` the LLM itself refuses to be used.

        Raises:
            RuntimeError: the LLM is running requests, or another AsyncLLM has its engine.
        """
        max_waiting_requests = integer("max_waiting_requests", max_waiting_requests, low=1)
        self = cls.__new__(cls)
        self._start(llm, max_waiting_requests)
        return self

    def _start(self, llm: LLM, max_waiting_requests: int) -> None:
        self._llm = llm
        self._lender: LLM | None = llm
        self._grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, "jpaged-grammars")
        self.tokenizer = llm.tokenizer
        self.input_processor = llm.input_processor
        self.output_processor = llm.output_processor
        self.input_processor.prepare()  # rather than while clients wait
        self._engine = llm.lend_engine()
        thread = EngineThread(self._engine, max_waiting_requests=max_waiting_requests)
        super().__init__(llm, self._engine, thread)
        self._dropped = weakref.finalize(self, _leave, thread, llm, self._engine)
        self._dropped.atexit = False

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRA | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; yields an output whenever there is more, the last one with `finished`.

        What an output holds, everything so far or what is new, is `sampling_params.output_kind`. A reader slower than
        the engine gets several tokens at once. Closing the iterator, or cancelling the task that waits for it, frees
        the request's memory before the next step.

        The prompt is tokenised, and a grammar compiled, in a thread beside the event loop.

        Args:
            request_id: the caller's name for it, free again when it ended.
            lora_request, tokenization_kwargs, priority: as in `LLM.generate`.

        Raises:
            ValueError: the prompt or a parameter is bad, as in `LLM.generate`, or request_id is running.
            EngineBusy: max_waiting_requests are waiting.
            EngineStopped: `shutdown` was called, or the engine failed.
        """
        (lora,) = one_lora_each(lora_request, 1)
        tokenization = Tokenization.of(tokenization_kwargs)
        chosen = self.get_default_sampling_params() if sampling_params is None else sampling_params
        (params,) = one_each(chosen, 1, SamplingParams)
        async with aclosing(self._outputs(prompt, params, request_id, priority, lora, tokenization)) as outputs:
            async for output in outputs:
                yield output

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        lora_request: LoRA | None = None,
        priority: int | None = None,
    ) -> RequestOutput:
        """Search for the most likely outputs of one prompt, as `LLM.beam_search` does.

        Args and raises: see `generate`. Cancelling the task that waits for it frees the search's memory.
        """
        (params,) = one_each(params, 1, BeamSearchParams)
        (lora,) = one_lora_each(lora_request, 1)
        async with aclosing(self._outputs(prompt, params, request_id, priority, lora)) as outputs:
            return await anext(outputs)

    async def _outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        priority: int | None,
        lora: LoRA | None,
        tokenization: Tokenization = DEFAULT,
    ) -> AsyncGenerator[RequestOutput, None]:
        (rank,) = priorities(priority, 1)
        kind = params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.FINAL_ONLY
        whole = kind is RequestOutputKind.FINAL_ONLY
        ticket = self._thread.reserve(request_id)
        try:
            make = partial(self.input_processor.process, streamed=not whole, tokenization=tokenization, lora=lora)
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                inside = partial(copy_context().run, make, prompt, params, rank)
                request = await asyncio.get_running_loop().run_in_executor(self._grammar_threads, inside)
            else:
                request = await asyncio.to_thread(make, prompt, params, rank)
            builder = self.output_processor.builder(request, request_id)
            self._thread.submit(ticket, request, TokenReader(request, whole=whole))
            async with aclosing(_told(ticket, builder, kind)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._thread.release(ticket)

    async def resume(
        self, request_id: str, output_kind: RequestOutputKind | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Go on with a request that came with a saved state, as `generate` would have.

        The first output holds everything that was generated so far. Whoever resumes it is its client: closing the
        iterator ends it.

        Args:
            request_id: one of `restored_requests`.
            output_kind: None = what its sampling_params said. A beam search has one output, at its end.

        Raises:
            ValueError: there is no such request, or a client has it already.
            EngineStopped: as `generate`.
        """
        known = self._thread.restored.get(request_id)
        kind = RequestOutputKind.FINAL_ONLY if known is None or known.beam else known.params.output_kind
        if output_kind is not None and not (known and known.beam):
            kind = output_kind
        whole = kind is RequestOutputKind.FINAL_ONLY
        ticket = self._thread.resume(request_id, lambda request: TokenReader(request, whole=whole))
        try:
            assert ticket.request is not None
            builder = self.output_processor.builder(ticket.request, request_id)
            async with aclosing(_told(ticket, builder, kind)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._thread.release(ticket)

    async def abort(self, request_id: str) -> None:
        """End a request; its memory is free when this returns, and its iterator ends with finish_reason "abort".

        A request that is not running is left alone.
        """
        await asyncio.wrap_future(self._thread.abort(request_id))

    def trainable(self) -> TrainableModel:
        """Give what `LLM.trainable` gives."""
        return self._llm.trainable()

    @property
    def config(self) -> SizedConfig:
        """Return the engine's settings, with the sizes that its device chose."""
        return self._llm.config

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the low-rank adapters that the engine has read."""
        return self.input_processor.adapters.names

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a sequence, prompt and output."""
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids; every id is below it."""
        return self.input_processor.vocab_size

    async def get_tokenizer(self) -> Any:
        """Give what `LLM.get_tokenizer` gives."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Give what `LLM.get_default_sampling_params` gives."""
        return self._llm.get_default_sampling_params()

    def chat_prompt(self, messages: Messages, **options: Unpack[ChatArguments]) -> dict[str, Any]:
        """Give what `LLM.chat_prompt` gives."""
        return self._llm.chat_prompt(messages, **options)

    async def shutdown(self) -> None:
        """Abort all requests and end the engine's thread; running iterators raise EngineStopped. Again is no error.

        What is to go on later is saved before, by `save_state`.

        The devices' memory is free when this returns, unless the engine is that of an LLM (`from_llm`).
        """
        await self.stop_saving()
        await asyncio.to_thread(self._thread.stop)
        self._grammar_threads.shutdown(wait=False)
        if self._owns:
            await asyncio.to_thread(self._engine.stop_compiling)
        self._dropped.detach()
        lender, self._lender = self._lender, None
        if lender is not None and (self._owns or not self._thread.failed):
            lender.take_back(self._engine)
            if self._owns:
                lender.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()


def _leave(thread: EngineThread, lender: LLM, engine: Engine) -> None:
    """End the thread of one that was dropped without `shutdown`, and give its engine back; waits for nothing."""
    thread.ended.add_done_callback(lambda end: None if end.exception() else lender.take_back(engine))
    thread.leave()


async def _told(ticket: Ticket, builder: OutputBuilder, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput, None]:
    """Yield outputs of what comes into a ticket's mailbox, until its request has finished."""
    finished = False
    while not finished:
        for progress in await ticket.mailbox.get():
            builder.add(progress)
            finished = progress.finished
        yield builder.delta() if kind is RequestOutputKind.DELTA else builder.cumulative()
