"""The public Python API: offline generation with vLLM's names."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack

from jpaged.config import EngineConfig
from jpaged.engine import offline
from jpaged.engine.pooling_handle import PoolingHandle
from jpaged.engine.process import refuse_pickling
from jpaged.outputs import RequestOutput, StreamDelta
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.text.adapters import LoRA, one_lora_each
from jpaged.text.batch import conversations, one_each, priorities, several
from jpaged.text.chat_template import ChatArguments, ChatOptions, ContentFormat, Messages
from jpaged.text.prompt import DEFAULT, Conversation, Prompt, Tokenization, chat_prompt
from jpaged.vllm_compat import engine_settings, missing_attribute


class LLM(PoolingHandle):
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

        name = str(model) if isinstance(model, Path) else model
        config = EngineConfig(model=name, **engine_settings(settings, EngineConfig))
        super().__init__(build_engine(config))
        if config.background_compilation:
            from jpaged.engine.first_shapes import compile_while_serving

            compile_while_serving(self._engine)

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
        on_error: offline.OnError = "raise",
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
        batch, tokenization = several(prompts), Tokenization.of(tokenization_kwargs)
        params = one_each(self._defaults(sampling_params), len(batch), SamplingParams)
        ranks, loras = priorities(priority, len(batch)), one_lora_each(lora_request, len(batch))
        return self._answer(batch, params, ranks, use_tqdm, on_error, tokenization, loras)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        lora_request: LoRA | Sequence[LoRA | None] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        on_error: offline.OnError = "raise",
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
        ranks, loras = priorities(priority, len(batch)), one_lora_each(lora_request, len(batch))
        return self._answer(batch, each, ranks, use_tqdm, on_error, loras=loras)

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
        ranks = priorities(priority, len(batch))
        processors = self.input_processor, self.output_processor
        loras = one_lora_each(lora_request, len(batch))
        return self._kept(offline.stream(self._engine, *processors, batch, params, ranks, loras))

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
        on_error: offline.OnError = "raise",
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
        batch, tokenization = conversations(messages, options), Tokenization.of(tokenization_kwargs)
        params = one_each(self._defaults(sampling_params), len(batch), SamplingParams)
        ranks, loras = priorities(None, len(batch)), one_lora_each(lora_request, len(batch))
        return self._answer(batch, params, ranks, use_tqdm, on_error, tokenization, loras)

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

    def _answer(
        self,
        batch: Sequence[Prompt | Conversation],
        params: Sequence[SamplingParams] | Sequence[BeamSearchParams],
        ranks: Sequence[int | None],
        use_tqdm: bool,
        on_error: offline.OnError,
        tokenization: Tokenization = DEFAULT,
        loras: Sequence[LoRA | None] | None = None,
    ) -> list[RequestOutput]:
        processors = self.input_processor, self.output_processor
        return offline.answer(self._engine, *processors, batch, params, ranks, use_tqdm, on_error, tokenization, loras)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing_attribute("LLM", name), name=name, obj=self)
