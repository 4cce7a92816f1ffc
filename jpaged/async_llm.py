"""The public API for servers: many clients, one engine, asyncio."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, nullcontext, suppress
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Unpack

from jpaged.cache_events import CacheEvents
from jpaged.claims import Claim, claim_folder, holds_folder
from jpaged.config import SizedConfig
from jpaged.engine.async_stream import RequestStream
from jpaged.engine.control import Released
from jpaged.engine.owner import Commit
from jpaged.engine.pooled import Pooled, Pooler, RunOptions
from jpaged.engine.process import refuse_pickling
from jpaged.engine.request_registry import name_of
from jpaged.engine.saved_state.keeper import PeriodicSaver
from jpaged.engine.stats import EngineStats
from jpaged.engine.thread import EngineThread
from jpaged.engine.weights import Running
from jpaged.errors import EngineStopped
from jpaged.llm import LLM
from jpaged.memory import MemoryMap, MemoryReport
from jpaged.metrics import Metric
from jpaged.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PinnedPrefix,
    PoolingRequestOutput,
    RequestOutput,
    SavedPrefix,
    SavedState,
    ScoringOutput,
)
from jpaged.pooling_params import PoolingParams
from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jpaged.scheduling import Request
from jpaged.text.adapters import LoRA
from jpaged.text.answer_choice import Choice
from jpaged.text.batch import one_each, one_lora_each, priorities
from jpaged.text.chat_answers import ChatReader
from jpaged.text.chat_template import ChatArguments, ChatOptions, Messages
from jpaged.text.long_text import TokenBound, encode_bounded
from jpaged.text.marked_prefixes import MarkedPrefix
from jpaged.text.output_processor import OutputBuilder
from jpaged.text.prompt import DEFAULT, Conversation, Prompt, Tokenization, chat_prompt
from jpaged.text.token_reader import TokenReader
from jpaged.validation import integer, number
from jpaged.vllm_refusals import with_vllms_arguments, with_vllms_attributes

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine
    from jpaged.engine_args import EngineArgs
    from jpaged.training import TrainableModel

T = TypeVar("T")
_GRAMMAR_THREADS = 2
"""Number of threads for requests with structured_outputs; slow grammars then leave all others to plain requests."""


@with_vllms_attributes
class AsyncLLM:
    """An `LLM` whose engine runs in its own thread, for any number of asyncio clients.

    Coroutines of any event loop may call it. Two names differ from `LLM` on purpose: `resume` continues one restored
    request for one client, as restored requests run by themselves here, and `is_sleeping` is a coroutine, as in vLLM.

    >>> async with AsyncLLM("smollm2-135m") as engine:                       # doctest: +SKIP
    ...     async for output in engine.generate("Once", SamplingParams(), "request-1"):
    ...         print(output.outputs[0].text)

    Args:
        model, settings: as of `LLM`.
        max_waiting_requests: most requests that wait for admission; beyond that, `generate` raises EngineBusy. Requests
            are admitted between steps, so all requests that come at one moment wait.
    """

    _owns = False

    def __init__(self, model: str | Path, *, max_waiting_requests: int = 256, **settings: Any) -> None:
        max_waiting_requests = integer("max_waiting_requests", max_waiting_requests, low=1)
        self._start(LLM(model, **settings), max_waiting_requests)
        self._owns = True

    @classmethod
    def from_llm(cls, llm: LLM, *, max_waiting_requests: int = 256) -> AsyncLLM:
        """Run the engine of an LLM, such as a warmed-up one; until `shutdown` the LLM itself cannot be used.

        Raises:
            RuntimeError: the LLM is running requests, or another AsyncLLM has its engine.
        """
        max_waiting_requests = integer("max_waiting_requests", max_waiting_requests, low=1)
        self = cls.__new__(cls)
        self._start(llm, max_waiting_requests)
        return self

    @classmethod
    @with_vllms_arguments("AsyncLLM.from_engine_args")
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Make an AsyncLLM with the settings of an `EngineArgs`, as vLLM's method of this name does."""
        return cls(engine_args.model, **engine_args.settings())

    def _start(self, llm: LLM, max_waiting_requests: int) -> None:
        self._llm = llm
        self._max_waiting = max_waiting_requests
        self._lender: LLM | None = llm
        self._grammar_threads = ThreadPoolExecutor(_GRAMMAR_THREADS, thread_name_prefix="jpaged-grammars")
        self.tokenizer = llm.tokenizer
        self.input_processor = llm.input_processor
        self.output_processor = llm.output_processor
        self.input_processor.prepare()  # rather than while clients wait
        self._saver: PeriodicSaver | None = None
        self._claim: Claim | None = None
        self._engine = llm.lend_engine()
        with ExitStack() as undo:
            undo.callback(llm.take_back, self._engine)
            self._thread = EngineThread(self._engine, max_waiting_requests=max_waiting_requests)
            undo.callback(self._thread.stop)
            self.control = llm.control.through(self._thread)
            self._dropped = weakref.finalize(self, _leave, self._thread, llm, self._engine)
            self._dropped.atexit = False
            undo.pop_all()

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    @with_vllms_arguments("AsyncLLM.generate")
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRA | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int | None = None,
        prompt_only: bool = False,
        taken: Callable[[], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt and yield an output whenever there are new tokens; the last one is `finished`.

        `sampling_params.output_kind` says whether an output holds everything so far or only the new part. A reader
        slower than the engine gets several tokens at once. Closing the iterator, or cancelling the task that waits for
        it, frees the request's memory before the next step.

        The prompt is tokenised, and a grammar compiled, outside of the event loop's thread.

        Args:
            request_id: the caller's name for the request; it is free again when the request has ended.
            lora_request, tokenization_kwargs, priority: as in `LLM.generate`.
            prompt_only: whether the prompt alone counts, for its log-probabilities: one token is drawn, of no meaning,
                and the prompt may have max_model_len tokens.
            taken: called in the event loop once the engine has taken the request, long before the first output at
                times; not called for a request that is refused.

        Raises:
            ValueError: the prompt or a parameter is bad, as in `LLM.generate`, or request_id is running.
            EngineBusy: max_waiting_requests are waiting.
            EngineStopped: `shutdown` was called, or the engine failed.
        """
        (lora,) = one_lora_each(lora_request, 1)
        tokenization = Tokenization.of(tokenization_kwargs)
        chosen = self.get_default_sampling_params() if sampling_params is None else sampling_params
        (params,) = one_each(chosen, 1, SamplingParams)
        running = self._outputs(prompt, params, request_id, priority, lora, tokenization, prompt_only, taken)
        async with aclosing(running) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRA | None = None,
        priority: int | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ChatArguments],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate the next turn of a conversation and yield outputs as `generate` does.

        The `message` of an output that ends, see `CompletionOutput`, has the answer's content, thought and tool calls.

        Args:
            messages, mm_processor_kwargs, options: as in `LLM.chat`.
            sampling_params, request_id, lora_request, priority: as in `generate`.

        Raises:
            ValueError, EngineBusy, EngineStopped: as `LLM.chat` and `generate`.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        conversation = Conversation(messages, ChatOptions(**options), mm_processor_kwargs)
        (lora,) = one_lora_each(lora_request, 1)
        (params,) = one_each(params, 1, SamplingParams)
        running = self._outputs(conversation, params, request_id, priority, lora)
        chat = ChatReader(self.output_processor.chats, conversation, params)
        async with aclosing(running) as outputs:
            async for output in outputs:
                yield await asyncio.to_thread(chat.read, output) if output.finished else chat.read(output)

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

    # ------------------------------------------------------------------ vectors, classes and scores

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return a vector for each prompt, as `LLM.embed` does, next to other clients' requests.

        Cancelling the task that waits for it frees the requests' memory.

        Args:
            place: makes a context that each prompt runs in, by which a server may make some wait for others.
            others: as in `LLM.embed`.

        Raises:
            ValueError: as `LLM.embed`.
            EngineBusy, EngineStopped: as `generate`.
        """
        options = RunOptions(False, tokenization_kwargs, lora_request)
        return await self._pool(lambda pooler: pooler.embed(prompts, pooling_params, options), place)

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of a model's classes for each prompt, as `LLM.classify` does; see `embed`."""
        options = RunOptions(False, tokenization_kwargs, lora_request)
        return await self._pool(lambda pooler: pooler.classify(prompts, options), place)

    async def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        lora_request: LoRA | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return the similarity of pairs of prompts, as `LLM.score` does; see `embed`.

        Raises:
            ValueError: `data_2` is None; only `LLM.score` scores single prompts.
        """
        if data_2 is None:
            raise ValueError("score() of an AsyncLLM needs pairs of prompts; LLM.score() scores single ones")
        options = RunOptions(False, tokenization_kwargs, lora_request)
        return await self._pool(lambda pooler: pooler.score(data_1, data_2, options), place)

    async def _pool(
        self, prepare: Callable[[Pooler], Pooled[T]], place: Callable[[], AbstractAsyncContextManager[None]]
    ) -> T:
        """Return the results of requests that `prepare` makes. No thread waits while they run: asyncio's are few, and
        tokenise the prompts of all clients."""
        work = await asyncio.to_thread(prepare, self._llm.pooler)
        await self._run_pooled(work.requests, place)
        return await asyncio.to_thread(work.results)

    async def _run_pooled(
        self, requests: Sequence[Request], place: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        """Run requests for vectors to their ends, some at a time, or abort all of them."""
        few = asyncio.Semaphore(max(1, min(self._max_waiting // 2, 2 * self.config.max_num_seqs)))

        async def run(request: Request) -> None:
            async with few, place():
                stream = self._thread.reserve(f"pooled-{request.request_id}")
                try:
                    self._thread.submit(stream, request, TokenReader(request, whole=True))
                    finished = False
                    while not finished:
                        finished = (await stream.updates.get())[-1].finished
                finally:
                    self._thread.release(stream)

        tasks = [asyncio.ensure_future(run(request)) for request in requests]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _outputs(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        priority: int | None,
        lora: LoRA | None,
        tokenization: Tokenization = DEFAULT,
        prompt_only: bool = False,
        taken: Callable[[], None] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        (level,) = priorities(priority, 1)
        kind = params.output_kind if isinstance(params, SamplingParams) else RequestOutputKind.FINAL_ONLY
        whole = kind is RequestOutputKind.FINAL_ONLY
        stream = self._thread.reserve(request_id)
        try:
            process = self.input_processor.process
            make = partial(process, streamed=not whole, tokenization=tokenization, lora=lora, prefill_only=prompt_only)
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                inside = partial(copy_context().run, make, prompt, params, level)
                request = await asyncio.get_running_loop().run_in_executor(self._grammar_threads, inside)
            else:
                request = await asyncio.to_thread(make, prompt, params, level)
            builder = self.output_processor.builder(request, request_id)
            stream.on_taken = taken
            self._thread.submit(stream, request, TokenReader(request, whole=whole))
            async with aclosing(_read(stream, builder, kind)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._thread.release(stream)

    async def resume(
        self, request_id: str, output_kind: RequestOutputKind | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a request that came with a saved state, as `generate` would have.

        The first output holds everything that was generated so far. The caller becomes the request's client: closing
        the iterator ends the request.

        Args:
            request_id: one of `restored_requests`.
            output_kind: None = that of its sampling_params. A beam search has one output, at its end.

        Raises:
            ValueError: there is no such request, or a client has it already.
            EngineStopped: as `generate`.
        """
        known = self._thread.restored.get(request_id)
        kind = RequestOutputKind.FINAL_ONLY if known is None or known.beam else known.params.output_kind
        if output_kind is not None and not (known and known.beam):
            kind = output_kind
        whole = kind is RequestOutputKind.FINAL_ONLY
        stream = self._thread.resume(request_id, lambda request: TokenReader(request, whole=whole))
        try:
            assert stream.request is not None
            builder = self.output_processor.builder(stream.request, request_id)
            async with aclosing(_read(stream, builder, kind)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._thread.release(stream)

    @with_vllms_arguments("AsyncLLM.abort")
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one or several requests.

        Their memory is free when this returns, and their iterators end with finish_reason "abort".

        A request that is not running is left alone.
        """
        names = [request_id] if isinstance(request_id, str) else request_id
        await asyncio.gather(*(asyncio.wrap_future(self._thread.abort(name)) for name in names))

    # ------------------------------------------------------------------ the model and its weights

    @property
    def config(self) -> SizedConfig:
        """Return the engine's settings, with the sizes that its device chose."""
        return self._llm.config

    @property
    def model_config(self) -> Any:
        """Return the model's description, as `LLM.model_config`."""
        return self._llm.model_config

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the low-rank adapters that the engine has read."""
        return self.input_processor.adapters.names

    def answer_formats(self, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Choice:
        """Return the formats by which a server reads the model's answers, as `LLM.answer_formats`."""
        return self._llm.answer_formats(tool_parser, reasoning_parser)

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a sequence, prompt and output."""
        return self._engine.max_model_len

    @property
    def max_media_bytes(self) -> int:
        """Return the most bytes of an encoded image or video in a prompt; 0 where the model takes text only."""
        return self.input_processor.images.max_bytes

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids; every id is below it."""
        return self.input_processor.vocab_size

    async def get_tokenizer(self) -> Any:
        """Return the same as `LLM.get_tokenizer`."""
        return await asyncio.to_thread(self.control.tokenizer)  # it may import transformers

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the same as `LLM.get_default_sampling_params`."""
        return self.control.default_sampling_params()

    def chat_prompt(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        truncate_prompt_tokens: int | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        marked_prefixes: Sequence[tuple[Messages, float]] = (),
        **options: Unpack[ChatArguments],
    ) -> dict[str, Any]:
        """Return the same as `LLM.chat_prompt`; a long text is not tokenized whole.

        Args:
            max_tokens: most tokens of the prompt; None = `max_model_len`. One that is a little longer is returned.
            truncate_prompt_tokens: see `SamplingParams`; tokens before those may be missing.
            add_special_tokens: whether the tokenizer adds its own to those of the template.
            marked_prefixes: beginnings of the conversation, of which the last message may be cut, each with the seconds
                that it stays: the prompt's `cache_breakpoints`.

        Raises:
            ValueError: the prompt is far too long, or as `LLM.chat_prompt`.
        """
        bound = self._bound(max_tokens, truncate_prompt_tokens)
        inputs, conversation = self.input_processor, Conversation(messages, ChatOptions(**options), mm_processor_kwargs)
        marks = [MarkedPrefix(*each) for each in marked_prefixes]
        return chat_prompt(
            conversation,
            inputs.tokenizer,
            inputs.images,
            bound,
            keeps_ends=inputs.keeps_ends,
            add_special_tokens=add_special_tokens,
            marks=marks,
        )

    def tokenize(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of a text. The caller's thread does the work.

        Args:
            max_tokens: as `chat_prompt`.

        Raises:
            ValueError: the model has no tokenizer, or the text is far too long.
        """
        if self.input_processor.tokenizer is None:
            raise ValueError("the model has no tokenizer")
        bound = self._bound(max_tokens, None)
        return encode_bounded(self.input_processor.tokenizer, text, add_special_tokens, bound)

    def _bound(self, max_tokens: int | None, truncate_prompt_tokens: int | None) -> TokenBound:
        bound = self.input_processor.bound(truncate_prompt_tokens)
        return bound if max_tokens is None else replace(bound, most=max_tokens, name="max_tokens")

    def trainable(self) -> TrainableModel:
        """Return the same as `LLM.trainable`."""
        return self.control.trainable()

    async def update_params(
        self, new: Any, *, cast: bool = False, copy: bool = False, running: Running = "recompute"
    ) -> None:
        """Replace the weights between two steps, as `LLM.update_params` does; `running` says how clients go on.

        The slow work is done in another thread; the engine's thread pauses only to swap the weights.

        Args and raises: see `LLM.update_params`.
        """
        prepare = partial(self.control.prepare_update, new, cast=cast, copy=copy, running=running)
        await self._run(await asyncio.to_thread(prepare))

    # ------------------------------------------------------------------ device memory

    async def release_memory(self, weights: Released = False) -> None:
        """Release the pool's memory, and the weights' on request, as `LLM.release_memory` does.

        Clients wait: their requests go on once the memory is restored, and new requests are queued.

        Args and raises: see `LLM.release_memory`.
        """
        await self._run(self.control.prepare_release(weights))

    async def restore_memory(self, params: Any = None) -> None:
        """Do what `LLM.restore_memory` does."""
        await self._run(await asyncio.to_thread(self.control.prepare_restore, params))

    async def is_sleeping(self) -> bool:
        """Tell whether the devices' memory was released."""
        return self.control.is_released

    @with_vllms_arguments("AsyncLLM.sleep")
    async def sleep(self, level: int = 1) -> None:
        """Do what `LLM.sleep` does, with clients treated as by `release_memory`."""
        await self._run(self.control.prepare_sleep(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do what `LLM.wake_up` does."""
        await self._run(self.control.prepare_wake(tags))

    # ------------------------------------------------------------------ cached and pinned prefixes

    @with_vllms_arguments("AsyncLLM.reset_prefix_cache")
    async def reset_prefix_cache(self) -> bool:
        """Do what `LLM.reset_prefix_cache` does."""
        return await self._run(self.control.prepare_cache_reset())

    async def pin_prefix(
        self,
        prompt: Prompt,
        cache_salt: str | None = None,
        *,
        seconds: float | None = None,
        name: str | None = None,
        most_share: float = 1.0,
    ) -> PinnedPrefix:
        """Do what `LLM.pin_prefix` does; clients are served meanwhile. Cancelling the call unpins the prefix.

        Args and raises: see `LLM.pin_prefix`.
        """
        control = self.control
        prepare = partial(control.prepare_pin, prompt, cache_salt, seconds, name, most_share, wait=False)
        commit = await asyncio.to_thread(prepare)
        begun = self._thread.ask(commit)

        def drop(begun: Future[PinnedPrefix]) -> None:
            if not begun.cancelled() and begun.exception() is None:
                with suppress(EngineStopped):
                    self._thread.ask(control.prepare_pin_cancel(begun.result()))

        try:
            pinned = await asyncio.shield(asyncio.wrap_future(begun))  # the commit runs even if this call is cancelled
            while not await self._run(control.prepare_pin_check(pinned)):
                pass  # the engine's thread has run a step in between
        except BaseException:
            begun.add_done_callback(drop)
            raise
        return pinned

    async def unpin(self, pinned: PinnedPrefix) -> None:
        """Do what `LLM.unpin` does."""
        await self._run(self.control.prepare_unpin(pinned))

    async def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Return the pinned prefixes, including restored ones, for `unpin`."""
        return await self._run(self.control.prepare_pinned())

    async def cache_events(self, after: int = 0, most: int = 1024) -> CacheEvents:
        """Do what `LLM.cache_events` does."""
        return await self._run(self.control.prepare_cache_events(after, most))

    async def save_prefix(self, folder: str | Path, prompt: Prompt, cache_salt: str | None = None) -> SavedPrefix:
        """Do what `LLM.save_prefix` does; clients are served meanwhile."""
        pinned = await self.pin_prefix(prompt, cache_salt)
        try:
            return await asyncio.to_thread(self.control.save_prefix, folder, pinned)
        finally:
            self._thread.ask(self.control.prepare_pin_cancel(pinned))

    async def load_prefix(self, folder: str | Path, cache_salt: str | None = None) -> int:
        """Do what `LLM.load_prefix` does; clients are served while the files are read."""
        return await asyncio.to_thread(self.control.load_prefix, folder, cache_salt)

    # ------------------------------------------------------------------ saved states

    async def save_state(self, folder: str | Path) -> SavedState:
        """Write the engine's state between two steps, as `LLM.save_state` does.

        The engine pauses while the state is copied, and goes on while it is written.
        """
        return await asyncio.to_thread(self.control.save_state, folder)

    def save_every(self, folder: str | Path, seconds: float) -> None:
        """Save the state periodically until `shutdown`.

        Each save begins `seconds` after the end of the last one, if something has happened since. `last_save` and a
        line in the log "jpaged.engine" say how long the engine paused. No other process may save to the folder
        meanwhile.

        Raises:
            ValueError: `seconds` is not positive.
            RuntimeError: `save_every` was called before.
            OSError: another process saves to the folder, or it cannot be written.
        """
        seconds = number("seconds", seconds, low=0.0, open_low=True)
        if self._saver is not None:
            raise RuntimeError("save_every() was called before: the state is being saved every so many seconds already")
        self.control.check()
        engine, folder = self._engine, Path(folder)
        if not holds_folder(folder):
            self._claim = claim_folder(folder)
        self._saver = PeriodicSaver(
            partial(self.control.save_state, folder),
            lambda: (engine.stats.num_steps, tuple(engine.requests.awaited)),
            seconds,
        )

    async def stop_saving(self) -> None:
        """End the saves of `save_every`, after the one being written; without `save_every` it does nothing."""
        if self._saver is not None:
            await asyncio.to_thread(self._saver.stop)
        if self._claim is not None:
            self._claim.release()

    @property
    def last_save(self) -> SavedState | None:
        """Return the last save of `save_every`; None before the first."""
        return None if self._saver is None else self._saver.last

    async def load_state(self, folder: str | Path) -> list[str]:
        """Load a saved state, as `LLM.load_state` does, and return the names of its requests.

        The requests run at once, whether or not a client takes them up by `resume`; their output is kept until a client
        does, or until `abort`.

        Args and raises: see `LLM.load_state`.
        """
        names = [name_of(request) for request in await asyncio.to_thread(self.control.load_state, folder)]
        await asyncio.wrap_future(self._thread.take_restored())
        return names

    @property
    def restored_requests(self) -> list[str]:
        """Return the names of the restored requests that no client has taken up, in order of arrival."""
        return list(self._thread.restored)

    # ------------------------------------------------------------------ reports and health

    def stats(self) -> EngineStats:
        """Return the same as `LLM.stats`; it never waits for the engine."""
        return self.control.stats()

    def get_metrics(self) -> list[Metric]:
        """Return the same as `LLM.get_metrics`."""
        return self.control.metrics()

    async def memory_report(self, *, peak: bool = False, replica: int = 0) -> MemoryReport:
        """Report what holds the pool's blocks, between two steps.

        Args and raises: see `LLM.memory_report`.
        """
        return await self._run(self.control.prepare_report(peak=peak, replica=replica))

    async def memory_map(self, *, replica: int = 0) -> MemoryMap:
        """Map every large page and block of the pool, between two steps; requests have their clients' names.

        Args and raises: see `LLM.memory_map`.
        """
        found = await self._run(self.control.prepare_map(replica=replica))
        return found.named(self._thread.request_names())

    async def check_health(self, timeout: float | None = None) -> None:
        """Raise unless the engine's thread runs and, with a timeout, ends its current step in time.

        Args:
            timeout: seconds to wait for the end of the current step; None = do not wait for a step.

        Raises:
            EngineStopped: `shutdown` was called, or the engine failed; its cause is the exception that ended it.
            TimeoutError: the current step has not ended in time.
        """
        self._thread.check()
        if timeout is not None:
            limit = number("timeout", timeout, low=0.0, open_low=True)
            await asyncio.wait_for(asyncio.wrap_future(self._thread.next_pause()), limit)

    async def ended(self) -> None:
        """Wait until the engine's thread has ended, by `shutdown` or by a failure.

        Raises:
            EngineStopped: it ended because the engine failed; its cause is the exception that ended it.
        """
        await asyncio.shield(asyncio.wrap_future(self._thread.ended))

    async def _run(self, commit: Commit[T]) -> T:
        """Run a commit in the engine's thread between two steps; its exceptions are raised only here."""
        return await asyncio.wrap_future(self._thread.ask(commit))

    @with_vllms_arguments("AsyncLLM.shutdown")
    async def shutdown(self) -> None:
        """Abort all requests and end the engine's thread; running iterators raise EngineStopped.

        Calling it twice is harmless. To continue the requests later, call `save_state` first.

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
    """End the thread of an AsyncLLM dropped without `shutdown` and give its engine back, without waiting."""
    thread.ended.add_done_callback(lambda end: None if end.exception() else lender.take_back(engine))
    thread.leave()


async def _read(
    stream: RequestStream, builder: OutputBuilder, kind: RequestOutputKind
) -> AsyncGenerator[RequestOutput, None]:
    """Yield a stream's outputs until its request has finished."""
    finished = False
    while not finished:
        for progress in await stream.updates.get():
            builder.add(progress)
            finished = progress.finished
        yield builder.delta() if kind is RequestOutputKind.DELTA else builder.cumulative()
