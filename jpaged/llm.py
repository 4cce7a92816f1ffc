"""The public Python API: offline generation with vLLM's names.

The file is long because the class is the API: most lines are documentation, and every method only calls the part of
the engine that does the work.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from jpaged.cache_events import CacheEvents
from jpaged.config import EngineConfig
from jpaged.engine.control import EngineControl, Released
from jpaged.engine.generate import Batch, OnError, generate, resume, stream
from jpaged.engine.owner import OwnedEngine
from jpaged.engine.pooled import Pooler, RunOptions, run_pooled
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
    SavedPrefix,
    SavedState,
    ScoringOutput,
    StreamDelta,
)
from jpaged.pooling_params import PoolingParams
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.short_tracebacks import is_refusal, short_traceback
from jpaged.text.adapters import LoRA
from jpaged.text.answer_choice import Choice
from jpaged.text.batch import conversations, one_each, one_lora_each, priorities, several, with_tokens
from jpaged.text.chat_template import ChatArguments, ChatOptions, ContentFormat, Messages
from jpaged.text.prompt import Conversation, Prompt, Tokenization, chat_prompt
from jpaged.text.served_formats import served_formats
from jpaged.vllm_compat import engine_settings
from jpaged.vllm_refusals import with_vllms_arguments, with_vllms_attributes

if TYPE_CHECKING:
    from jpaged.engine.engine import Engine
    from jpaged.engine_args import EngineArgs
    from jpaged.training import TrainableModel


@with_vllms_attributes
class LLM:
    """A language model with paged KV memory.

    >>> llm = LLM("smollm2-135m")                                            # doctest: +SKIP
    >>> llm.generate(["The capital of France is"])[0].outputs[0].text        # doctest: +SKIP

    Over several hosts the same script runs on each: ``jax.distributed.initialize()``, then ``LLM(...)``, which returns
    on process 0 only. The other processes follow process 0 inside that call and exit with it; they never reach the code
    after the call.

    Threads take turns: a call waits until the calls of other threads have returned, and each delta of a stream is its
    own turn. (`AsyncLLM` serves many callers at once.) A process that is forked later cannot use the LLM.

    Ctrl-C, or any other exception, ends the call that it interrupts. That call's requests are dropped; streams that
    share the engine go on. Ctrl-C in `generate`, `chat` or `beam_search` raises
    `jpaged.errors.GenerationInterrupted`, a KeyboardInterrupt whose `outputs` have the text so far.

    Args:
        model: alias (``smollm2-135m``), hub id, Hugging Face folder, ``.gguf`` file, URL or saved checkpoint.
        settings: see `EngineConfig`; vLLM's names are accepted where they mean the same.

    The devices' memory is free again when the LLM is deleted or closed, or at the end of a ``with LLM(...) as llm:``.

    Raises:
        ProcessLost: one of several processes was lost. Generating raises it too. This process then exits by itself
            within seconds, as its devices might wait for the lost process forever.
        ValueError: a setting is out of its range, or the model or its pool does not fit; the message names the
            value and the limit. Or the setting is one of vLLM's that jpaged lacks; the message names the alternative.
        TypeError: a setting is unknown.
    """

    @short_traceback
    def __init__(self, model: str | Path, **settings: Any) -> None:
        from jpaged.engine.builder import build_engine  # imports jax, which takes a second
        from jpaged.engine.step_dump import record_if_asked

        name = str(model) if isinstance(model, Path) else model
        config = EngineConfig(model=name, **engine_settings(settings, EngineConfig, model))
        built = build_engine(config)
        record_if_asked(built)
        served = built.served
        self.config = served.config
        self.model_config = served.model_config
        self.tokenizer = served.tokenizer
        self.input_processor = served.input_processor
        self.output_processor = served.output_processor
        self._owner = OwnedEngine(built.engine)
        self.pooler = Pooler(served)
        self.control = EngineControl(served, self._owner)
        if config.background_compilation:
            from jpaged.engine.startup_compilation import compile_while_serving

            compile_while_serving(built.engine)

    @staticmethod
    def compile_programs(
        model: str | Path, folder: str | Path, *, use_tqdm: bool = True, **settings: Any
    ) -> tuple[int, int]:
        """Compile all programs of an engine into a folder.

        ``LLM(model, compiled_programs=folder)`` with the same settings, versions and kind of machine then neither
        traces nor compiles them.

        Args:
            model, settings: as for `LLM`.
            folder: created if missing, and written anew if it holds such programs.
            use_tqdm: whether to show a progress bar.

        Returns:
            Number of programs, and bytes of their files.

        Raises:
            ValueError: as `LLM`; or nothing would be compiled (enforce_eager), or a draft model has its own weights.
            FileExistsError: the folder holds something else.
        """
        from jpaged.engine.compile_ahead import compile_programs

        config = EngineConfig(model=str(model), **engine_settings(settings, EngineConfig, model))
        return compile_programs(config, folder, use_tqdm=use_tqdm)

    @classmethod
    def restore_state(cls, folder: str | Path, **settings: Any) -> Self:
        """Make an LLM with the model, the settings and the state of the engine that was saved in a folder.

        `resume` then runs the state's requests to their ends; `AsyncLLM.from_llm` takes them over. A server that has
        its own settings, or that must start even if the state is refused, uses `load_state` instead.

        Args:
            folder: the folder given to `save_state`.
            settings: settings to change, ``model`` included; `load_state` describes the consequences.

        Raises:
            StateRefused: there is no state, or it is damaged or of another model or format.
            ValueError, TypeError: as `LLM`.
        """
        from jpaged.engine.saved_state.keeper import saved_settings

        saved = saved_settings(folder)
        model = settings.pop("model", saved.pop("model"))
        llm = cls(model, **{**saved, **engine_settings(settings, EngineConfig, model)})
        try:
            llm.load_state(folder)
        except BaseException:
            llm.close()
            raise
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Make an LLM with the settings of an `EngineArgs`, as vLLM's method of this name does."""
        return cls(engine_args.model, **engine_args.settings())

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    # ------------------------------------------------------------------ generation

    @short_traceback
    @with_vllms_arguments("LLM.generate")
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        priority: int | Sequence[int] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate for a batch of prompts and return the outputs in the order of the prompts.

        Args:
            prompts: one or several of: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``. A mapping may
                hold ``"cache_salt"``: prompts share cached KV only with those of the same salt. If it has text and
                ids, the ids are used and the text is only echoed in the output. It may hold ``"multi_modal_data":
                {"image": ...}`` with one image or several, for each of which the prompt has the model's placeholder.
                An image is a PIL image, a ``data:`` URL, or a source that the setting `images` allows.
            sampling_params: one for all, or one each; None = `get_default_sampling_params()`.
            use_tqdm: show a progress bar.
            lora_request: the low-rank adapter, one for all or one each; None = the model without an adapter. It is a
                `LoRARequest`, or the name of an adapter of the setting lora_modules. Needs enable_lora=True.
            priority: one for all, or one each; lower is served first. Needs ``scheduling_policy="priority"``.
            prompt_token_ids: the prompts' tokens, of one prompt or of each; `prompts` are then texts that are only
                echoed, or absent.
            tokenization_kwargs: ``{"add_special_tokens": False}`` leaves out the tokens that the tokenizer adds to a
                text; ``{"truncation": True, "max_length": n}`` uses the last n tokens of each prompt.
            on_error: "raise" refuses the whole batch for one bad prompt before anything runs; "return" runs the
                others and returns a RequestOutput with `error` for the bad one.

        Raises:
            ValueError: a prompt is empty, too long for max_model_len, or could never fit the pool; or a priority
                is given although requests are served in order of arrival.
        """
        batch = several(prompts) if prompt_token_ids is None else with_tokens(prompts, prompt_token_ids)
        params = one_each(self._defaults(sampling_params), len(batch), SamplingParams)
        tokenization = Tokenization.of(tokenization_kwargs)
        loras = one_lora_each(lora_request, len(batch))
        return self._run(
            Batch(batch, params, priorities(priority, len(batch)), tokenization, loras), use_tqdm, on_error
        )

    @short_traceback
    @with_vllms_arguments("LLM.beam_search")
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
            One for each prompt, with `beam_width` outputs, the best `score` first; `sequences` has them in vLLM's form.

        Raises:
            ValueError: as `generate`, or beam_width is above max_num_seqs or too large for the vocabulary.
        """
        batch = several(prompts)
        each = one_each(params, len(batch), BeamSearchParams)
        loras = one_lora_each(lora_request, len(batch))
        return self._run(Batch(batch, each, priorities(priority, len(batch)), loras=loras), use_tqdm, on_error)

    @short_traceback
    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> Generator[StreamDelta, None, None]:
        """Generate for one or several prompts and yield new text and tokens as they come.

        Closing the generator, or leaving its loop and dropping it, aborts the requests that still run and frees their
        memory at once. Other calls of `generate` and `stream` may come in between; they share the batch.

        Args: as `generate`.

        Raises:
            ValueError: as `generate`, or prompt_logprobs are requested; a prompt that could never fit the pool is
                refused at the first delta.
        """
        batch = several(prompts)
        params = one_each(self._defaults(sampling_params), len(batch), SamplingParams)
        loras = one_lora_each(lora_request, len(batch))
        checked = Batch(batch, params, priorities(priority, len(batch)), loras=loras)
        return self._kept(stream(self._owner.engine, self.input_processor, self.output_processor, checked))

    @short_traceback
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
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate the next turn of one or several conversations, through the model's chat template.

        Args:
            messages: a conversation (``[{"role": ..., "content": ...}, ...]``) or a list of them. Content is text or
                a list of parts ``{"type": "text", "text": ...}``, joined by newlines unless the template takes parts.
                Parts may be images too: ``{"type": "image_url", "image_url": {"url": ...}}``, or of type "image_pil" or
                "image" with a PIL image under that name.
            sampling_params, use_tqdm, lora_request, priority, tokenization_kwargs, on_error: as `generate`; a
                conversation counts as a prompt, to which the tokenizer adds nothing by default.
            chat_template, chat_template_content_format, add_generation_prompt, continue_final_message: see
                `jpaged.text.chat_template.ChatOptions`.
            tools, chat_template_kwargs: see `ChatOptions` too.
            mm_processor_kwargs: see `jpaged.inputs.TextPrompt`.

        Returns:
            One for each conversation. The `message` of its outputs has the answer's content, thought and tool calls,
            and ``message.to_dict()`` is it as the conversation's next message.

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
        batch = conversations(messages, options, mm_processor_kwargs)
        params = one_each(self._defaults(sampling_params), len(batch), SamplingParams)
        tokenization = Tokenization.of(tokenization_kwargs)
        loras = one_lora_each(lora_request, len(batch))
        levels = priorities(priority, len(batch))
        outputs = self._run(Batch(batch, params, levels, tokenization, loras), use_tqdm, on_error)
        return self.output_processor.chats.with_messages(outputs, batch, params)

    @short_traceback
    def chat_prompt(
        self,
        messages: Messages,
        *,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ChatArguments],
    ) -> dict[str, Any]:
        """Turn a conversation into a prompt for `generate` and `stream`, by the chat template.

        Args:
            mm_processor_kwargs, options: the arguments of `chat` from chat_template to mm_processor_kwargs.

        Raises:
            ValueError: there is no chat template, or the messages do not fit it, or as `chat`.
        """
        inputs, conversation = self.input_processor, Conversation(messages, ChatOptions(**options), mm_processor_kwargs)
        return chat_prompt(conversation, self.tokenizer, inputs.images, keeps_ends=inputs.keeps_ends)

    def answer_formats(self, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Choice:
        """Return the formats by which a server reads the model's tool calls and thoughts.

        Args:
            tool_parser, reasoning_parser: values of the server's options of these names; None = the format that the
                chat template renders, or for thoughts the one that the setting reasoning_config names.

        Raises:
            ValueError: a format is unknown, or no thought could end as the setting reasoning_config says.
        """
        config = self.config.reasoning_config
        return served_formats(self.tokenizer, config, self.vocab_size, tool_parser, reasoning_parser)

    def _kept(self, deltas: Generator[StreamDelta, None, None]) -> Generator[StreamDelta, None, None]:
        """Yield a stream's deltas. The generator keeps this LLM alive, even if the caller drops the LLM."""
        try:
            yield from deltas
        except ValueError as error:  # the pool's refusal, at the first delta
            if not is_refusal(error):
                raise
            raise error.with_traceback(None) from None

    def _defaults(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.get_default_sampling_params() if sampling_params is None else sampling_params

    def _run(self, batch: Batch, use_tqdm: bool, on_error: OnError) -> list[RequestOutput]:
        processors = self.input_processor, self.output_processor
        return generate(self._owner.engine, *processors, batch, use_tqdm, on_error)

    # ------------------------------------------------------------------ vectors, classes and scores

    @short_traceback
    @with_vllms_arguments("LLM.embed")
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return a vector for each prompt, pooled from the hidden states after the model's final norm.

        Args:
            prompts, use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.
            pooling_params: one for all, or one each; None = as the model's folder says.

        Raises:
            ValueError: a prompt is empty, too long or could never fit the pool; `dimensions` is above the model's; the
                model's folder asks for an unknown pooling or module; or there are several replicas.
        """
        options = RunOptions(use_tqdm, tokenization_kwargs, lora_request)
        return run_pooled(self._owner, self.pooler.embed(prompts, pooling_params, options), use_tqdm)

    @short_traceback
    @with_vllms_arguments("LLM.classify")
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of a model's classes for each prompt, computed from its last token.

        Args:
            prompts, use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.

        Raises:
            ValueError: the model has no head for classes (``score.weight``); or as `embed`.
        """
        options = RunOptions(use_tqdm, tokenization_kwargs, lora_request)
        return run_pooled(self._owner, self.pooler.classify(prompts, options), use_tqdm)

    @short_traceback
    @with_vllms_arguments("LLM.score")
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
        """Return the log-probability of each prompt, or the similarity of pairs of prompts.

        Args:
            data_1: prompts. Without `data_2`, a prompt's score is the log-probability of all its tokens after the
                first.
            data_2: prompts to compare with those of `data_1`: equally many, or any number if `data_1` is one prompt.
                The score is the cosine of their vectors, as `embed` returns them. A model with a head for one class (a
                cross-encoder) reads both texts as one prompt, joined as its tokenizer joins them, and the score is that
                class's probability.
            use_tqdm, lora_request, tokenization_kwargs: as `LLM.generate`.

        Raises:
            ValueError: the numbers of prompts differ; `data_2` is None and the model has no head for its vocabulary; it
                has several classes, or it has one and a prompt of a pair is not a text; or as `embed`.
        """
        options = RunOptions(use_tqdm, tokenization_kwargs, lora_request)
        if data_2 is None:
            return self.pooler.likelihoods(self._owner, data_1, options)
        return run_pooled(self._owner, self.pooler.score(data_1, data_2, options), use_tqdm)

    # ------------------------------------------------------------------ the model and its weights

    def get_tokenizer(self) -> Any:
        """Return the tokenizer as a transformers object.

        The engine mostly works with a lighter tokenizer of the same files, so a change of the object, such as another
        chat template, does not change the engine. The first call may import transformers, which takes seconds.

        Raises:
            ValueError: the model has none.
        """
        return self.control.tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without SamplingParams: generation_config.json's, else vLLM's defaults."""
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
        """Compile every shape that the engine can need and return their number.

        Later compilations count as recompiles. With ``enforce_eager=True`` nothing is compiled ahead.

        Args:
            use_tqdm: whether to show a progress bar.
        """
        return self.control.run(self.control.prepare_warmup(use_tqdm=use_tqdm))

    @property
    def num_recompiles(self) -> int:
        """Return how many shapes were compiled after `warmup`."""
        return self.control.engine.runner.worker.num_recompiles

    @property
    def params(self) -> Any:
        """Return the weights: a pytree of sharded arrays.

        A CPU that computes in float32 holds the matrices of a bfloat16 checkpoint in bfloat16, and others in panels of
        columns. Reading `params` turns them into float32 arrays, which the engine then holds too, and its programs are
        compiled again.

        Raises:
            RuntimeError: `release_memory` dropped the weights or moved them to the host; or a signal's handler reads
                them in the middle of a step while they are not held as arrays.
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
        again with the next request. The log-probabilities of generated tokens stay those of the weights that drew them.

        A CPU that computes in float32 holds matrices in the forms that `params` describes. The first update replaces
        them by arrays, and its programs are compiled again. A state dict avoids that, if its tensors are in bfloat16
        where the engine's are. With ``deterministic=True`` only matrices in bfloat16 are replaced by arrays.

        Args:
            new: a pytree with the structure, shapes and dtypes of `params`. It is placed like them on the engine's
                devices, and copied from device to device if its arrays are on others. NNX's forms are accepted too: a
                module, an `nnx.State`, the result of `nnx.split`, plain dictionaries. Or a state dict: all tensors of
                the model by the names of its Hugging Face checkpoint, in arrays of NumPy, JAX, PyTorch or any library
                that NumPy understands. The devices hold the old weights too until it is read.
            cast: whether other floating dtypes are changed to the engine's, and a state dict is quantised as the
                engine's weights are.
            copy: whether the engine gets its own arrays. Otherwise it shares arrays that are already in place on its
                devices: a trainer that donates its weights to the next step would then delete the engine's.
            running: treatment of requests that have begun and not ended. "recompute": the KV of their tokens so far is
                computed again with the new weights, and so are the log-probabilities or vectors of their prompts; beam
                searches begin again. "finish": they keep their KV, which no other request can find, and go on with the
                new weights; a request that is preempted by recomputation computes its KV anew. "abort": they end with
                finish_reason "abort". Requests that wait for admission are computed with the new weights, but "abort"
                ends them too.

        Raises:
            ValueError: `new` is none of these; a leaf or tensor differs (the message names the first); or
                running="finish" while a request holds images. The old weights stay.
            RuntimeError: the weights are on several hosts, and only this one has the new ones; or a signal's handler
                calls it in the middle of a step.
        """
        self.control.run(self.control.prepare_update(new, cast=cast, copy=copy, running=running))

    # ------------------------------------------------------------------ device memory

    def release_memory(self, weights: Released = False) -> None:
        """Release the pool's memory, and the weights' on request, until `restore_memory` or `resume`.

        The prefix cache is empty afterwards and pinned prefixes are computed again. Requests that have begun, such as
        those of open streams, wait with their tokens; after the restore they are computed again and go on with the same
        tokens. Until then every call that needs a step raises RuntimeError. Reading from a stream meanwhile ends the
        stream and aborts its requests.

        Args:
            weights: False keeps them. "host" moves them to host memory. True drops them, and new ones have to be given.
                Arrays that the caller holds too, from `params` or given to `update_params`, live on.

        Raises:
            ValueError: `weights` is something else.
            RuntimeError: a signal's handler calls it in the middle of a step; or the weights to release are on several
                hosts.
        """
        self.control.run(self.control.prepare_release(weights))

    def restore_memory(self, params: Any = None) -> None:
        """Take back the memory that `release_memory` released; if it released none, only `params` matter.

        Args:
            params: new weights, as `update_params` takes them; None = the old weights.

        Raises:
            ValueError: there are no old weights, or the new ones do not fit.
        """
        self.control.run(self.control.prepare_restore(params))

    @property
    def is_sleeping(self) -> bool:
        """Tell whether the devices' memory was released."""
        return self.control.is_released

    @short_traceback
    @with_vllms_arguments("LLM.sleep")
    def sleep(self, level: int = 1) -> None:
        """Do what vLLM's `sleep` does: ``release_memory("host")`` at level 1, ``release_memory(True)`` at level 2.

        Raises:
            ValueError: `level` is neither.
        """
        self.control.run(self.control.prepare_sleep(level))

    @short_traceback
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Do what vLLM's `wake_up` does: take back the weights and the pool, or the parts that `tags` names.

        ``["weights"]`` takes back the weights only. ``"kv_cache"`` takes back the pool, and the weights if they are
        still missing, as steps can run afterwards. After ``sleep(level=2)``, call `update_params` before the pool is
        taken back.

        Raises:
            ValueError: a tag is unknown, or the pool is requested while there are no weights.
        """
        self.control.run(self.control.prepare_wake(tags))

    # ------------------------------------------------------------------ cached and pinned prefixes

    @short_traceback
    @with_vllms_arguments("LLM.reset_prefix_cache")
    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, and release the memory of a CPU's pool.

        While requests run or prefixes are pinned, it does nothing and returns False.
        """
        return self.control.run(self.control.prepare_cache_reset())

    @short_traceback
    def pin_prefix(
        self,
        prompt: Prompt,
        cache_salt: str | None = None,
        *,
        seconds: float | None = None,
        name: str | None = None,
        most_share: float = 1.0,
    ) -> PinnedPrefix:
        """Keep the KV of a prompt's whole blocks in the pool until `unpin`, and compute it if needed.

        Longer prompts that begin with it share it (the shared prefix that a provider registers; PagedAttention, section
        4.4). Each replica keeps a copy. Requests that run, as those of `stream`, go on in the steps that compute it.

        Args:
            cache_salt: salt that prompts must have to share the prefix; the prompt's mapping may hold it instead.
            seconds: how long it stays at most, from when it is computed; None = until `unpin`.
            name: a name for it, which `pinned_prefixes` returns, also after a saved state was loaded.
            most_share: largest part of the pool's large pages that all pinned prefixes may take with it.

        Raises:
            ValueError: the prompt fills no block, prefix caching is off, the pinned prefixes would take too large a
                share of the pool, or the rest of it would be too small for a sequence of max_model_len tokens or for a
                request that was accepted.
        """
        return self.control.run(self.control.prepare_pin(prompt, cache_salt, seconds, name, most_share, wait=True))

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Unpin a prefix, so that it can be evicted; ValueError if it is no longer pinned."""
        self.control.run(self.control.prepare_unpin(pinned))

    @property
    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Return the pinned prefixes, including restored ones, for `unpin`."""
        return self.control.run(self.control.prepare_pinned())

    @short_traceback
    def cache_events(self, after: int = 0, most: int = 1024) -> CacheEvents:
        """Return changes of cached blocks from a number on, see `CacheEvent`; ask next from `CacheEvents.next`.

        Args:
            after: number of the first event.
            most: number of events that are returned at most.

        Raises:
            ValueError: the LLM was made without ``kv_cache_events``, or a number is out of its range.
        """
        return self.control.run(self.control.prepare_cache_events(after, most))

    @short_traceback
    def save_prefix(self, folder: str | Path, prompt: Prompt, cache_salt: str | None = None) -> SavedPrefix:
        """Write the KV of a prompt's whole blocks, which is computed if needed, for `load_prefix` of other processes.

        Args:
            folder: created if missing; it holds this prefix and nothing else.
            prompt: of text or token ids; images cannot be saved.
            cache_salt: see `pin_prefix`.

        Raises:
            ValueError: see `pin_prefix`; or the prompt has images.
            OSError: writing fails; what the folder held stays.
        """
        pinned = self.pin_prefix(prompt, cache_salt)
        try:
            return self.control.save_prefix(folder, pinned)
        finally:
            self.control.run(self.control.prepare_pin_cancel(pinned))

    @short_traceback
    def load_prefix(self, folder: str | Path, cache_salt: str | None = None) -> int:
        """Put a prefix that `save_prefix` wrote into the prefix cache, and return how many tokens it has.

        Prompts that begin with it find it until it is evicted; `pin_prefix` with the same prompt keeps it.

        Args:
            cache_salt: salt that prompts must have to find it; None = the one that it was saved with.

        Raises:
            StateRefused: there is no prefix, or it is damaged, or of other weights, another dtype, or other layers,
                block sizes or devices.
            ValueError: prefix caching is off, or the pool has no room for it.
        """
        return self.control.load_prefix(folder, cache_salt)

    # ------------------------------------------------------------------ saved states

    def save_state(self, folder: str | Path) -> SavedState:
        """Write the engine's state between two steps: requests with their outputs, KV in use or cached, queues, pins.

        `load_state` and `restore_state` go on from it. Call it between two deltas of `stream`, or in a handler of
        SIGINT, SIGTERM or SIGALRM, which may come in the middle of `generate`; from another thread it waits until
        `generate` has returned. An interrupted save leaves the previous one. Requests of `embed`, `classify` and
        `score` are left out.

        Args:
            folder: created if missing; it holds the last save and nothing else.

        Raises:
            RuntimeError: a handler of another signal calls it in the middle of a step, or any handler in the middle of
                a save; or the devices belong to several processes.
            OSError: writing fails, or another process saves to the folder, as a server does to its `--state-dir`.
        """
        return self.control.save_state(folder)

    def load_state(self, folder: str | Path) -> list[str]:
        """Load a saved state and return the names of its requests in order of arrival.

        `resume` runs them to their ends.

        The LLM must be fresh. Its settings may differ from those of the saved engine. If its blocks mean something
        else, as on another number of devices, requests are computed again from their tokens; in a smaller pool, only
        those without room are. Their tokens stay the same. A request that could never end here, as in a pool that is
        too small for it, ends with finish_reason "abort" and a stop_reason that says why.

        Raises:
            StateRefused: there is no state, or it is damaged or of another model or format; the LLM is unchanged.
            RuntimeError: this LLM has requests or pinned prefixes.
        """
        return [name_of(request) for request in self.control.load_state(folder)]

    @property
    def restored_requests(self) -> list[str]:
        """Return the names of the requests of `load_state` that no caller has taken up.

        A name is the one that a client of an AsyncLLM gave, or else the request's number.
        """
        return list(self.control.engine.requests.restored_by_name())

    def resume(self, use_tqdm: bool = True, *, params: Any = None) -> list[RequestOutput]:
        """Run restored requests to their ends and return their whole outputs in order of arrival.

        Before that it takes back released memory, as `restore_memory` does. Each `request_id` is one of
        `restored_requests`. After an interruption it can be called again.

        Args:
            use_tqdm: whether to show a progress bar.
            params: see `restore_memory`.

        Raises:
            ValueError: as `restore_memory`.
        """
        if params is not None or self.is_sleeping:
            self.restore_memory(params)
        return resume(self._owner.engine, self.output_processor, use_tqdm)

    # ------------------------------------------------------------------ reports

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges; it takes a few microseconds, and any thread may call it."""
        return self.control.stats()

    def get_metrics(self) -> list[Metric]:
        """Return `stats` as named metrics, as vLLM's `get_metrics` does; the names begin with "jpaged:"."""
        return self.control.metrics()

    @short_traceback
    def memory_report(self, *, peak: bool = False, replica: int = 0) -> MemoryReport:
        """Report what holds the pool's blocks; `str()` of the report is a table.

        Args:
            peak: whether to show the busiest step so far (to within 5 % of its blocks) instead of now.
            replica: number of the replica whose pool is shown, below data_parallel_size.

        Raises:
            ValueError: there is no such replica, or `peak` is not True or False.
        """
        return self.control.run(self.control.prepare_report(peak=peak, replica=replica))

    @short_traceback
    def memory_map(self, *, replica: int = 0) -> MemoryMap:
        """Map every large page and block of the pool now: its group, state, owner and number of tokens.

        A notebook draws the map; `MemoryMap.changes` compares two. The first map walks the pool; later ones cost only
        as much as has changed in between.

        Args:
            replica: number of the replica whose pool is shown, below data_parallel_size.

        Raises:
            ValueError: there is no such replica.
        """
        return self.control.run(self.control.prepare_map(replica=replica))

    def reset_peak(self) -> None:
        """Forget the busiest step: `memory_report(peak=True)` then covers the steps from now on."""
        self.control.run(self.control.prepare_peak_reset())

    # ------------------------------------------------------------------ ownership

    def check_health(self) -> None:
        """Raise if the engine was closed.

        Raises:
            EngineStopped: the engine was closed.
        """
        self._owner.check_open()

    def close(self) -> None:
        """Abort all requests, end all streams and free the devices' memory. Calling it twice is harmless.

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
        """Lend the engine to the only thread that may touch it until `take_back`; meanwhile the LLM cannot be used.

        Restored requests that no caller has taken up go with the engine.

        Raises:
            RuntimeError: requests are running, or the engine is lent already.
        """
        return self._owner.lend()

    def take_back(self, engine: Engine) -> None:
        """Take the engine back from the `AsyncLLM` that had it."""
        self._owner.take_back()
