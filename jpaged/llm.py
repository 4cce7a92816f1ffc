"""The public Python API: offline generation with vLLM's names.

The file is long because the class is the API: most lines are documentation, and every method only calls the part of
the engine that does the work.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from jpaged.config import EngineConfig
from jpaged.engine.control import EngineControl, Released
from jpaged.engine.generate import Batch, OnError, generate, resume, stream
from jpaged.engine.owner import OwnedEngine
from jpaged.engine.pooled import Pooler, RunOptions
from jpaged.engine.process import refuse_pickling
from jpaged.engine.request_registry import name_of
from jpaged.engine.stats import EngineStats
from jpaged.engine.weights import Running
from jpaged.memory import MemoryMap, MemoryReport
from jpaged.metrics import Metric
from jpaged.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PinnedPrefix,
    PoolingRequestOutput,
    RequestOutput,
    SavedState,
    ScoringOutput,
    StreamDelta,
)
from jpaged.pooling_params import PoolingParams
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.text.adapters import LoRA
from jpaged.text.batch import conversations, one_each, one_lora_each, priorities, several
from jpaged.text.chat_template import ChatArguments, ChatOptions, ContentFormat, Messages
from jpaged.text.prompt import Conversation, Prompt, Tokenization, chat_prompt
from jpaged.vllm_compat import engine_settings, missing_attribute

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine
    from jpaged.training import TrainableModel


class LLM:
    """A language model with paged KV memory.

    >>> llm = LLM("smollm2-135m")                                            # doctest: +SKIP
    >>> llm.generate(["The capital of France is"])[0].outputs[0].text        # doctest: +SKIP

    Over several hosts the same script runs on each: ``jax.distributed.initialize()``, then ``LLM(...)``, which returns
    on process 0 only. The other processes serve it from there and exit when it does; they never get to what follows.

    Threads take turns: a call waits until those of other threads have returned, and each delta of a stream is a turn of
    its own. (`AsyncLLM` serves many callers at once.) A process that is forked off later cannot use it.

    Ctrl-C, or any other exception, ends the call it comes in; what that call asked for is dropped, and streams that
    share the engine go on.

    Args:
        model: alias (``smollm2-135m``), hub id, Hugging Face folder, ``.gguf`` file or saved checkpoint.
        settings: see `EngineConfig`; names of vLLM's settings are taken where they mean the same.

    The devices' memory is free again when the LLM is deleted or closed, or at the end of a ``with LLM(...) as llm:``.

    Raises:
        ProcessLost: a process of several is gone. Generating raises it too. The process then ends by itself within
            seconds, as the devices may wait for the lost one for ever.
        ValueError: a setting is out of its range, or the model or its pool does not fit; the message names the
            value and the limit. Or it is one of vLLM's settings that is not one here; the message says what is.
        TypeError: a setting is unknown.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        from jpaged.engine.builder import build_engine  # imports jax, which takes a second
        from jpaged.engine.step_dump import record_if_asked

        name = str(model) if isinstance(model, Path) else model
        config = EngineConfig(model=name, **engine_settings(settings, EngineConfig))
        built = build_engine(config)
        record_if_asked(built)
        served = built.served
        self.config = served.config
        self.model_config = served.model_config
        self.tokenizer = served.tokenizer
        self.input_processor = served.input_processor
        self.output_processor = served.output_processor
        self._owner = OwnedEngine(built.engine)
        self._pooler = Pooler(served, self._owner)
        self.control = EngineControl(served, self._owner)
        if config.background_compilation:
            from jpaged.engine.startup_compilation import compile_while_serving

            compile_while_serving(built.engine)

    @staticmethod
    def compile_programs(
        model: str | Path, folder: str | Path, *, use_tqdm: bool = True, **settings: Any
    ) -> tuple[int, int]:
        """Compile all programs of an engine into a folder; ``LLM(model, compiled_programs=folder)`` with the same
        settings, versions and kind of machine then neither traces nor compiles them.

        Args:
            folder: made, or written anew if it holds such programs.
            settings: as for `LLM`.

        Returns:
            Number of programs, and bytes of their files.

        Raises:
            ValueError: as `LLM`; or nothing would be compiled (enforce_eager), or a draft model has its own weights.
            FileExistsError: the folder holds something else.
        """
        from jpaged.engine.compile_ahead import compile_programs

        config = EngineConfig(model=str(model), **engine_settings(settings, EngineConfig))
        return compile_programs(config, folder, use_tqdm=use_tqdm)

    @classmethod
    def restore_state(cls, folder: str | Path, **settings: Any) -> Self:
        """Load the model whose engine's state a folder holds, with that engine's settings, and go on from the state.

        `resume` runs the requests that came with it to their ends; an `AsyncLLM.from_llm` takes them over. Where a
        server has settings of its own, or is to start without a state that is refused, use `load_state`.

        Args:
            folder: what `save_state` was given.
            settings: settings that are to be others, ``model`` among them; see `load_state` for what follows from that.

        Raises:
            StateRefused: there is no state, or it is damaged or of another model or format.
            ValueError, TypeError: as `LLM`.
        """
        from jpaged.engine.saved_state.keeper import saved_settings

        saved = saved_settings(folder)
        model = settings.pop("model", saved.pop("model"))
        llm = cls(model, **{**saved, **engine_settings(settings, EngineConfig)})
        try:
            llm.load_state(folder)
        except BaseException:
            llm.close()
            raise
        return llm

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        priority: int | Sequence[int] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate for a batch of prompts; outputs come in the order of the prompts.

        Args:
            prompts: one or several of: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``. A mapping may
                hold ``"cache_salt"``: prompts share cached KV only with those of the same salt. Of one with text and
                ids, the ids are used and the text is only echoed in the output. It may hold ``"multi_modal_data":
                {"image": ...}`` with one image or several, for each of which the prompt has the model's placeholder:
                PIL images and ``data:`` URLs, and what the setting `images` allows.
            sampling_params: one for all, or one each; None = `get_default_sampling_params()`.
            use_tqdm: show a progress bar.
            lora_request: the low-rank adapter to run with, one for all or one each, None for the model as it is: a
                `LoRARequest`, or the name of an adapter of the setting lora_modules. Needs enable_lora=True.
            priority: one for all, or one each; lower is served first. Needs ``scheduling_policy="priority"``.
            tokenization_kwargs: ``{"add_special_tokens": False}`` leaves out what the tokenizer adds to a text;
                ``{"truncation": True, "max_length": n}`` uses the last n tokens of each prompt.
            on_error: "raise" refuses the whole batch for one bad prompt before anything runs; "return" runs the
                others and gives the bad one a RequestOutput with `error`.

        Raises:
            ValueError: a prompt is empty, too long for max_model_len, or could never fit the pool; or a priority
                is given where requests are served in order of arrival.
        """
        batch = several(prompts)
        params = one_each(self._defaults(sampling_params), len(batch), SamplingParams)
        tokenization = Tokenization.of(tokenization_kwargs)
        loras = one_lora_each(lora_request, len(batch))
        return self._run(
            Batch(batch, params, priorities(priority, len(batch)), tokenization, loras), use_tqdm, on_error
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Search for the most likely outputs of a batch of prompts, with transformers' rules and scores.

        The beams of a prompt share its memory and, copied on write, that of the tokens they have in common.

        Args:
            prompts, lora_request, use_tqdm, priority, on_error: as `generate`.
            params: one for all, or one each.

        Returns:
            One a prompt, with `beam_width` outputs, the one of the best `score` first; and as vLLM's `sequences`.

        Raises:
            ValueError: as `generate`, or beam_width is above max_num_seqs or too large for the vocabulary.
        """
        batch = several(prompts)
        each = one_each(params, len(batch), BeamSearchParams)
        loras = one_lora_each(lora_request, len(batch))
        return self._run(Batch(batch, each, priorities(priority, len(batch)), loras=loras), use_tqdm, on_error)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> Generator[StreamDelta, None, None]:
        """Generate for one or several prompts and yield what is new as it comes.

        Closing the generator, or leaving its loop and dropping it, aborts what still runs and frees its memory at
        once. Other calls of `generate` and `stream` may come between; they share the batch.

        Args: as `generate`.

        Raises:
            ValueError: as `generate`, or prompt_logprobs are asked for; a prompt that could never fit the pool is
                refused at the first delta.
        """
        batch = several(prompts)
        params = one_each(self._defaults(sampling_params), len(batch), SamplingParams)
        loras = one_lora_each(lora_request, len(batch))
        checked = Batch(batch, params, priorities(priority, len(batch)), loras=loras)
        return self._kept(stream(self._owner.engine, self.input_processor, self.output_processor, checked))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate the next turn of one or several conversations, through the model's chat template.

        Args:
            messages: a conversation (``[{"role": ..., "content": ...}, ...]``) or a list of them. Content is text or
                a list of parts ``{"type": "text", "text": ...}``, joined by newlines unless the template takes parts.
                Parts may be images too: ``{"type": "image_url", "image_url": {"url": ...}}``, or of type "image_pil" or
                "image" with a PIL image under that name.
            sampling_params, use_tqdm, lora_request, tokenization_kwargs, on_error: as `generate`; a conversation
                counts as a prompt, to which the tokenizer adds nothing unless told to.
            chat_template, chat_template_content_format, add_generation_prompt, continue_final_message: see
                `jpaged.text.chat_template.ChatOptions`.
            tools, chat_template_kwargs: see there too.

        Raises:
            ValueError: there is no chat template, messages or tools do not fit it, both add_generation_prompt and
                continue_final_message are True, or as `generate`.
        """
        options = ChatOptions(
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        batch = conversations(messages, options)
        params = one_each(self._defaults(sampling_params), len(batch), SamplingParams)
        tokenization = Tokenization.of(tokenization_kwargs)
        loras = one_lora_each(lora_request, len(batch))
        return self._run(Batch(batch, params, tokenization=tokenization, loras=loras), use_tqdm, on_error)

    def chat_prompt(self, messages: Messages, **options: Unpack[ChatArguments]) -> dict[str, Any]:
        """The prompt a conversation becomes through the chat template, for `generate` and `stream`.

        Args:
            options: those of `chat` that say how, from chat_template to chat_template_kwargs.

        Raises:
            ValueError: there is no chat template, or the messages do not fit it, or as `chat`.
        """
        return chat_prompt(Conversation(messages, ChatOptions(**options)), self.tokenizer, self.input_processor.images)

    def _kept(self, deltas: Generator[StreamDelta, None, None]) -> Generator[StreamDelta, None, None]:
        """Give a stream's deltas; while it lives, so does this LLM, however soon its user forgets it."""
        yield from deltas

    def _defaults(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.get_default_sampling_params() if sampling_params is None else sampling_params

    def _run(self, batch: Batch, use_tqdm: bool, on_error: OnError) -> list[RequestOutput]:
        processors = self.input_processor, self.output_processor
        return generate(self._owner.engine, *processors, batch, use_tqdm, on_error)

    # ------------------------------------------------------------------ vectors, classes and scores

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return a vector for each prompt, made of the hidden states after the model's final norm.

        Args:
            prompts, use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.
            pooling_params: one for all, or one each; None = as the model's folder says.

        Raises:
            ValueError: a prompt is empty, too long or could never fit the pool; `dimensions` is above the model's; the
                model's folder asks for a pooling or a module that is not known here; or there are replicas.
        """
        options = RunOptions(use_tqdm, tokenization_kwargs, lora_request)
        return self._pooler.embed(prompts, pooling_params, options)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of a model's classes for each prompt, which it reads off the last token.

        Args:
            prompts, use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.

        Raises:
            ValueError: the model has no head for classes (``score.weight``); or as `embed`.
        """
        options = RunOptions(use_tqdm, tokenization_kwargs, lora_request)
        return self._pooler.classify(prompts, options)

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt] | None = None,
        /,
        use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return how likely each prompt is or, of two, how alike they are.

        Args:
            data_1: prompts. Alone, a prompt's score is the log-probability of all its tokens after the first.
            data_2: prompts to compare with those of `data_1`, as many, or any number for one; the score is the cosine
                of their vectors, as `embed` gives them. A model with a head for one class (a cross-encoder) reads both
                texts as one prompt, joined as its tokenizer joins them, and the score is that class's probability.
            use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.

        Raises:
            ValueError: the numbers of prompts differ; the model has no vocabulary's head, which a prompt alone needs;
                it has several classes, or one and a prompt of a pair is no text; or as `embed`.
        """
        options = RunOptions(use_tqdm, tokenization_kwargs, lora_request)
        return self._pooler.score(data_1, data_2, options)

    # ------------------------------------------------------------------ the model and its weights

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, which is transformers'.

        Raises:
            ValueError: the model has none.
        """
        return self.control.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what requests without SamplingParams get: what generation_config.json advises, and else vLLM's
        defaults."""
        return self.control.default_sampling_params()

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a sequence, prompt and output."""
        return self.control.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids; every id is below it."""
        return self.input_processor.vocab_size

    @property
    def dtype(self) -> Any:
        """Return the dtype of activations and of weights that are not quantised."""
        return self.control.held_weights.dtype

    def warmup(self, *, use_tqdm: bool = True) -> int:
        """Compile every shape the engine can meet and return how many there are. Later compilations count as
        recompiles.

        With ``enforce_eager=True`` nothing is compiled ahead.
        """
        return self.control.run(self.control.prepare_warmup(use_tqdm=use_tqdm))

    @property
    def num_recompiles(self) -> int:
        """Return how many shapes were compiled after `warmup`."""
        return self.control.engine.runner.worker.num_recompiles

    @property
    def params(self) -> Any:
        """Return the weights: a pytree of sharded arrays.

        A CPU that computes in float32 holds the matrices of a checkpoint in bfloat16 as they are, and others in panels
        of columns. Asking for the weights makes float32 arrays of them, which the engine then holds too, and its
        programs are compiled again.

        Raises:
            RuntimeError: `release_memory` let go of them or moved them to the host; or a signal's handler asks in the
                middle of a step for weights that are not held as arrays.
        """
        return self.control.run(self.control.prepare_params())

    def trainable(self) -> TrainableModel:
        """Return the model as `jpaged.training` differentiates it, in the tree of `params`."""
        return self.control.trainable()

    def update_params(
        self, new: Any, *, cast: bool = False, copy: bool = False, running: Running = "recompute"
    ) -> None:
        """Replace the weights in place, as an RL loop does after each optimiser step.

        Cached KV belongs to the old weights, so the prefix cache is empty afterwards, and pinned prefixes are computed
        again with the next request. The log-probabilities of tokens that were generated stay those of the weights that
        drew them.

        A CPU that computes in float32, and holds matrices as `params` says, holds arrays from the first update on, and
        its programs are compiled again, unless a state dict brings them, in bfloat16 where they are held so. With
        ``deterministic=True`` only those in bfloat16 become others.

        Args:
            new: a pytree with the structure, shapes and dtypes of `params`, which is placed on the engine's devices as
                they are, from device to device where the arrays lie on others. NNX's forms of it are taken too: a
                module, an `nnx.State`, what `nnx.split` gives, plain dictionaries. Or a state dict: all tensors of the
                model by the names of its Hugging Face checkpoint, in arrays of NumPy, JAX, PyTorch or any library that
                NumPy understands. The devices hold the old weights too until it is read.
            cast: whether other floating dtypes are changed to the engine's, and a state dict is quantised as the
                engine's weights are.
            copy: whether the engine gets arrays of its own. Else it holds those that lie where its own do: a trainer
                that donates its weights to the next step would take the engine's away.
            running: what becomes of requests that have begun and not ended. "recompute": the KV of their tokens so far
                is computed again with the new weights, and so is what they asked of their prompts; beam searches begin
                again. "finish": they keep their KV, which nobody else finds, and read it with the new weights; one that
                is preempted by recomputation computes it anew. "abort": they end with finish_reason "abort". Those
                that wait for admission are computed with the new weights, but "abort" ends them too.

        Raises:
            ValueError: `new` is none of these; a leaf or tensor differs, the first of which is named; or
                running="finish" while a request holds images. The old weights stay.
            RuntimeError: the weights lie on several hosts, of which only this one has the new; or a signal's handler
                calls it in the middle of a step.
        """
        self.control.run(self.control.prepare_update(new, cast=cast, copy=copy, running=running))

    # ------------------------------------------------------------------ device memory

    def release_memory(self, weights: Released = False) -> None:
        """Give the pool's memory back, and the weights' if asked, until `restore_memory` or `resume`.

        The prefix cache is empty afterwards and pinned prefixes are computed again. Requests that have begun, as those
        of open streams, wait with their tokens; they are computed again and go on with the same tokens. Until then
        whatever needs a step raises RuntimeError; a stream that is asked for its next delta meanwhile ends by that, and
        its requests with it.

        Args:
            weights: False: they stay. "host": they move to host memory. True: they are let go of, and others have to be
                given. Arrays that the caller holds too, from `params` or given to `update_params`, live on.

        Raises:
            ValueError: `weights` is something else.
            RuntimeError: a signal's handler calls it in the middle of a step; or weights are to be released that lie on
                several hosts.
        """
        self.control.run(self.control.prepare_release(weights))

    def restore_memory(self, params: Any = None) -> None:
        """Take the memory again that `release_memory` gave back; where it gave none, only `params` matter.

        Args:
            params: new weights, as `update_params` takes them; None = those of before.

        Raises:
            ValueError: there are no weights of before, or the new ones do not fit.
        """
        self.control.run(self.control.prepare_restore(params))

    @property
    def is_sleeping(self) -> bool:
        """Tell whether memory is given back."""
        return self.control.is_released

    def sleep(self, level: int = 1) -> None:
        """Do what vLLM's `sleep` does: ``release_memory("host")`` at level 1, ``release_memory(True)`` at level 2.

        Raises:
            ValueError: `level` is neither.
        """
        self.control.run(self.control.prepare_sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do what vLLM's `wake_up` does: take weights and pool again, or with `tags` ``["weights"]`` these only;
        ``"kv_cache"`` brings the weights along where they are not there yet, as steps begin with it. After
        ``sleep(level=2)`` `update_params` brings the weights before the pool is taken.

        Raises:
            ValueError: a tag is unknown, or the pool is asked for while there are no weights.
        """
        self.control.run(self.control.prepare_wake(tags))

    # ------------------------------------------------------------------ cached and pinned prefixes

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, and give back the memory of a CPU's pool; return False, with nothing done, while
        requests run or prefixes are pinned."""
        return self.control.run(self.control.prepare_cache_reset())

    def pin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> PinnedPrefix:
        """Keep the KV of a prompt's whole blocks in the pool until `unpin`, computing it if need be, for prompts that
        begin with it and go on (the shared prefix a provider registers; PagedAttention, section 4.4). Of several
        replicas, each keeps it.

        Args:
            cache_salt: salt that prompts must have to share the prefix; it may stand in the prompt's mapping instead.

        Raises:
            ValueError: the prompt fills no block, prefix caching is off, or the rest of the pool would be too small
                for a sequence of max_model_len tokens.
            RuntimeError: requests are running.
        """
        return self.control.run(self.control.prepare_pin(prompt, cache_salt))

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Let a pinned prefix be evicted again; ValueError when it is not pinned any more."""
        self.control.run(self.control.prepare_unpin(pinned))

    @property
    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Return what is pinned, restored pins among them, for `unpin`."""
        return self.control.run(self.control.prepare_pinned())

    # ------------------------------------------------------------------ saved states

    def save_state(self, folder: str | Path) -> SavedState:
        """Write the engine's state as it is between two steps: requests and what they have generated, the KV in use or
        cached, queues, pins. `load_state` and `restore_state` go on from it.

        Call it between two deltas of `stream`, or in a handler of SIGINT, SIGTERM or SIGALRM, which may come in the
        middle of `generate`; from another thread it waits until `generate` has returned. A save that is interrupted
        leaves the one before.

        Args:
            folder: made where there is none; it holds the last save and nothing else.

        Raises:
            RuntimeError: `pin_prefix` is computing a prefix, or `embed`, `classify` or `score` a vector; a handler of
                another signal came in the middle of a step, any came in the middle of a save; or the devices belong to
                several processes.
            OSError: the disk refuses.
        """
        return self.control.save_state(folder)

    def load_state(self, folder: str | Path) -> list[str]:
        """Go on from a saved state and return the names of the requests that came with it, in order of arrival.

        `resume` runs them to their ends.

        The LLM must be fresh. Its settings may be others than those of the engine that was saved: where its blocks mean
        something else, as on another number of devices, requests are computed again from their tokens, and in a smaller
        pool those that have no room are. Their tokens stay the same. A request that could never end here, as in a pool
        that is too small for it, ends with finish_reason "abort" and a stop_reason that says why.

        Raises:
            StateRefused: there is no state, or it is damaged or of another model or format; the LLM is as it was.
            RuntimeError: this LLM has requests or pinned prefixes.
        """
        return [name_of(request) for request in self.control.load_state(folder)]

    @property
    def restored_requests(self) -> list[str]:
        """Return the names of the requests that `load_state` brought and nobody has taken up: what the client of an
        AsyncLLM called them, or their numbers."""
        return list(self.control.engine.requests.restored_by_name())

    def resume(self, use_tqdm: bool = True, *, params: Any = None) -> list[RequestOutput]:
        """Take released memory again, as `restore_memory` does, then run restored requests to their ends and return
        their whole outputs, in order of arrival; each `request_id` is one of `restored_requests`. Where it is
        interrupted, it can be called again.

        Args and raises: `params`, see `restore_memory`.
        """
        if params is not None or self.is_sleeping:
            self.restore_memory(params)
        return resume(self._owner.engine, self.output_processor, use_tqdm)

    # ------------------------------------------------------------------ reports

    def stats(self) -> EngineStats:
        """Return what the engine has done and does now; it costs a few microseconds, and any thread may ask."""
        return self.control.stats()

    def get_metrics(self) -> list[Metric]:
        """Return `stats` as metrics with names, as vLLM's `get_metrics` does; the names begin with "jpaged:"."""
        return self.control.metrics()

    def memory_report(self, *, peak: bool = False, replica: int = 0) -> MemoryReport:
        """Return who holds the pool's blocks; `str()` of it is a table.

        Args:
            peak: whether to show the busiest step so far (to within 5 % of its blocks) instead of now.
            replica: number of the replica whose pool is shown, below data_parallel_size.

        Raises:
            ValueError: there is no such replica, or `peak` is not True or False.
        """
        return self.control.run(self.control.prepare_report(peak=peak, replica=replica))

    def memory_map(self, *, replica: int = 0) -> MemoryMap:
        """Return what lies in every large page and block of the pool now: which group, which state, whose, how many
        tokens. A notebook draws it; `MemoryMap.changes` compares two.

        The first map walks the pool; later ones cost what changed in between.

        Args:
            replica: number of the replica whose pool is shown, below data_parallel_size.

        Raises:
            ValueError: there is no such replica.
        """
        return self.control.run(self.control.prepare_map(replica=replica))

    def reset_peak(self) -> None:
        """Forget the busiest step: `memory_report(peak=True)` looks at those from now on."""
        self.control.run(self.control.prepare_peak_reset())

    # ------------------------------------------------------------------ ownership

    def check_health(self) -> None:
        """Do nothing while the engine can be used.

        Raises:
            EngineStopped: it was closed.
        """
        self._owner.check_open()

    def close(self) -> None:
        """Free the devices' memory at once: requests are aborted, streams end. Closing again is no error.

        Weights that the caller holds too, from `params` or given to `update_params`, live on.

        Raises:
            RuntimeError: an AsyncLLM has the engine; shut that down first.
        """
        self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def lend_engine(self) -> Engine:
        """Hand the engine to the only thread that may touch it until `take_back`; meanwhile the LLM cannot be used.
        Requests that came with a saved state and that nobody has taken up go with it.

        Raises:
            RuntimeError: requests are running, or the engine is lent already.
        """
        return self._owner.lend()

    def take_back(self, engine: Engine) -> None:
        """Take the engine back from the `AsyncLLM` that had it."""
        self._owner.take_back()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing_attribute("LLM", name), name=name, obj=self)
