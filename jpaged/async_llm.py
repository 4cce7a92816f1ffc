"""The public API for servers: many clients, one engine, asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from jpaged.engine_thread import EngineThread
from jpaged.llm import LLM
from jpaged.memory import MemoryReport
from jpaged.messages import Messages
from jpaged.outputs import RequestOutput
from jpaged.prompts import Prompt, chat_prompt, make_request, one_each, priorities
from jpaged.sampling_params import SamplingParams


class AsyncLLM:
    """An `LLM` whose engine runs in a thread of its own, for any number of asyncio clients.

    >>> async with AsyncLLM("smollm2-135m") as engine:                       # doctest: +SKIP
    ...     async for output in engine.generate("Once", SamplingParams(), "request-1"):
    ...         print(output.outputs[0].text)

    Args:
        model, settings: as of `LLM`.
        max_waiting_requests: most requests that wait for admission; beyond, `generate` raises EngineBusy. Requests are
            admitted between steps: of those that come at one moment, all wait.
    """

    def __init__(self, model: str | Path, *, max_waiting_requests: int = 256, **settings: Any) -> None:
        _check_bound(max_waiting_requests)
        self._start(LLM(model, **settings), max_waiting_requests)

    @classmethod
    def from_llm(cls, llm: LLM, *, max_waiting_requests: int = 256) -> AsyncLLM:
        """Run the engine of an LLM, say one that is warmed up; until `shutdown` the LLM itself refuses to be used.

        Raises:
            RuntimeError: the LLM is running requests, or another AsyncLLM has its engine.
        """
        _check_bound(max_waiting_requests)
        self = cls.__new__(cls)
        self._start(llm, max_waiting_requests)
        return self

    def _start(self, llm: LLM, max_waiting_requests: int) -> None:
        self._lender: LLM | None = llm
        self.tokenizer = llm.tokenizer
        self._engine = llm.lend_engine()
        self._thread = EngineThread(self._engine, llm.tokenizer, max_waiting_requests=max_waiting_requests)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; yields everything generated so far whenever there is more, at last with `finished`.

        A reader slower than the engine gets several tokens at once. Closing the iterator, or cancelling the task that
        waits for it, frees the request's memory before the next step.

        Args:
            request_id: the caller's name for it, free again when it ended.

        Raises:
            ValueError: the prompt or a parameter is bad, as in `LLM.generate`, or request_id is running.
            EngineBusy: max_waiting_requests are waiting.
            EngineStopped: `shutdown` was called, or the engine failed.
        """
        (params,) = one_each(SamplingParams() if sampling_params is None else sampling_params, 1, SamplingParams)
        (rank,) = priorities(priority, 1)
        ticket = self._thread.submit(
            request_id,
            lambda: make_request(self._engine, self.tokenizer, prompt, params, rank, streamed=True),
        )
        try:
            while True:
                output = await ticket.mailbox.get()
                yield output
                if output.finished:
                    return
        finally:
            self._thread.release(ticket)

    async def abort(self, request_id: str) -> None:
        """End a request; its memory is free when this returns, and its iterator ends with finish_reason "abort".

        A request that is not running is left alone.
        """
        await asyncio.wrap_future(self._thread.abort(request_id))

    async def memory_report(self) -> MemoryReport:
        """Who holds the pool's blocks, between two steps."""
        return await asyncio.wrap_future(self._thread.call(self._engine.memory.report))

    def chat_prompt(self, messages: Messages, *, add_generation_prompt: bool = True) -> dict[str, Any]:
        """As `LLM.chat_prompt`."""
        return chat_prompt(messages, self.tokenizer, add_generation_prompt=add_generation_prompt)

    async def shutdown(self) -> None:
        """Abort all requests and end the engine's thread; running iterators raise EngineStopped. Again is no error."""
        await asyncio.to_thread(self._thread.stop)
        if self._lender is not None and not self._thread.failed:
            self._lender.take_back(self._engine)
            self._lender = None

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown()


def _check_bound(max_waiting_requests: int) -> None:
    if isinstance(max_waiting_requests, bool) or not isinstance(max_waiting_requests, int) or max_waiting_requests < 1:
        raise ValueError(f"max_waiting_requests={max_waiting_requests!r} must be a positive integer")
