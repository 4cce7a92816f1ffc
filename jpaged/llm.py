"""The public Python API: offline generation with vLLM's names."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jpaged import offline
from jpaged.beam_search_params import BeamSearchParams
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.memory import MemoryReport
from jpaged.messages import Messages
from jpaged.outputs import PinnedPrefix, RequestOutput, StreamDelta
from jpaged.progress import warmup_progress
from jpaged.prompts import (
    Conversation,
    Prompt,
    chat_prompt,
    check_salt,
    one_each,
    parse_prompt,
    priorities,
    several,
)
from jpaged.sampling_params import SamplingParams


class LLM:
    """A language model with paged KV memory.

    >>> llm = LLM("smollm2-135m")                                            # doctest: +SKIP
    >>> llm.generate(["The capital of France is"])[0].outputs[0].text        # doctest: +SKIP

    Over several hosts the same script runs on each: ``jax.distributed.initialize()``, then ``LLM(...)``, which returns
    on process 0 only. The other processes serve it from there and exit when it does; they never get to what follows.

    Args:
        model: alias (``smollm2-135m``), hub id, Hugging Face folder, ``.gguf`` file or saved checkpoint.
        settings: see `EngineConfig`.

    Raises:
        ProcessLost: a process of several is gone. Generating raises it too. The process then ends by itself within
            seconds, as the devices may wait for the lost one for ever.
        ValueError: a setting is out of its range, or the model or its pool does not fit; the message names the
            value and the limit.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        from jpaged.build import build_engine  # imports jax, which takes a second

        self.config = EngineConfig(model=str(model) if isinstance(model, Path) else model, **settings)
        built = build_engine(self.config)
        self.model_config = built.model_config
        self.tokenizer = built.tokenizer
        self._dtype = built.dtype
        self._engine: Engine = built.engine

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        on_error: offline.OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate for a batch of prompts; outputs come in the order of the prompts.

        Args:
            prompts: one or several of: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``. A mapping may
                hold ``"cache_salt"``: prompts share cached KV only with those of the same salt. Of one with text and
                ids, the ids are used and the text is only echoed in the output.
            sampling_params: one for all, or one each; None = `SamplingParams()`.
            priority: one for all, or one each; lower is served first. Needs ``scheduling_policy="priority"``.
            use_tqdm: show a progress bar.
            on_error: "raise" refuses the whole batch for one bad prompt before anything runs; "return" runs the
                others and gives the bad one a RequestOutput with `error`.

        Raises:
            ValueError: a prompt is empty, too long for max_model_len, or could never fit the pool; or a priority
                is given where requests are served in order of arrival.
        """
        batch = several(prompts)
        params = one_each(SamplingParams() if sampling_params is None else sampling_params, len(batch), SamplingParams)
        return offline.answer(
            self._engine, self.tokenizer, batch, params, priorities(priority, len(batch)), use_tqdm, on_error
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        on_error: offline.OnError = "raise",
    ) -> list[RequestOutput]:
        """Search for the most likely outputs of a batch of prompts, with transformers' rules and scores.

        The beams of a prompt share its memory and, copied on write, that of the tokens they have in common.

        Args:
            prompts, priority, use_tqdm, on_error: as `generate`.
            params: one for all, or one each.

        Returns:
            One a prompt, with `beam_width` outputs, the one of the best `score` first.

        Raises:
            ValueError: as `generate`, or beam_width is above max_num_seqs or too large for the vocabulary.
        """
        batch = several(prompts)
        each = one_each(params, len(batch), BeamSearchParams)
        return offline.answer(
            self._engine, self.tokenizer, batch, each, priorities(priority, len(batch)), use_tqdm, on_error
        )

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
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
        params = one_each(SamplingParams() if sampling_params is None else sampling_params, len(batch), SamplingParams)
        return offline.stream(self._engine, self.tokenizer, batch, params, priorities(priority, len(batch)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: offline.OnError = "raise",
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Generate the next turn of one or several conversations, through the model's chat template.

        Args:
            messages: a conversation (``[{"role": ..., "content": ...}, ...]``) or a list of them. Content is text or
                a list of parts ``{"type": "text", "text": ...}``, joined by newlines unless the template takes parts.
            sampling_params, use_tqdm, on_error: as `generate`; a conversation counts as a prompt.
            add_generation_prompt: end the prompt where the assistant's turn begins.

        Raises:
            ValueError: the model has no chat template, or messages do not fit it, or as `generate`.
        """
        one = isinstance(messages, str | Mapping) or not isinstance(messages, Sequence)
        if one or (messages and isinstance(messages[0], Mapping)):
            messages = [cast(Messages, messages)]
        batch = [Conversation(cast(Messages, each), add_generation_prompt) for each in messages]
        params = one_each(SamplingParams() if sampling_params is None else sampling_params, len(batch), SamplingParams)
        return offline.answer(
            self._engine, self.tokenizer, batch, params, priorities(None, len(batch)), use_tqdm, on_error
        )

    def chat_prompt(self, messages: Messages, *, add_generation_prompt: bool = True) -> dict[str, Any]:
        """The prompt a conversation becomes through the model's chat template, for `generate` and `stream`.

        Raises:
            ValueError: the model has no chat template, or the messages do not fit it.
        """
        return chat_prompt(messages, self.tokenizer, add_generation_prompt=add_generation_prompt)

    # ------------------------------------------------------------------ the engine's state

    def warmup(self, *, use_tqdm: bool = True) -> int:
        """Compile every shape the engine can meet; returns how many. Later compilations count as recompiles."""
        if self._engine.has_work:
            raise RuntimeError("warmup() while requests run")
        runner = self._engine.runner
        with warmup_progress(runner.num_warmup, use_tqdm) as advance:
            for name in runner.warmup():
                advance(name)
        return runner.worker.num_compiled

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence, prompt and output."""
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._engine.vocab_size

    @property
    def dtype(self) -> Any:
        """Of weights that are not quantised, and of activations."""
        return self._dtype

    @property
    def num_recompiles(self) -> int:
        """Shapes compiled after `warmup`."""
        return self._engine.runner.worker.num_recompiles

    @property
    def params(self) -> Any:
        """The weights: a pytree of sharded arrays."""
        return self._engine.runner.worker.params

    def update_params(self, new: Any) -> None:
        """Swap the weights in place, as an RL loop does after each optimiser step.

        Args:
            new: same structure, shapes and dtypes as `params`; placed on the engine's devices as they are.

        Raises:
            ValueError: naming the first leaf that differs; the old weights stay.
            RuntimeError: requests are running or prefixes are pinned, whose KV belongs to the old weights; or the
                weights lie on several hosts, of which only this one has the new.
        """
        if self._engine.has_work or any(replica.pins.seq_ids for replica in self._engine.replicas):
            raise RuntimeError("update_params() while requests run or prefixes are pinned")
        self._engine.runner.worker.update_params(new)
        self.reset_prefix_cache()  # cached KV belongs to the old weights

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False, with nothing done, while requests run or prefixes are pinned."""
        if self._engine.has_work:
            return False
        return all(replica.memory.reset_prefix_cache() for replica in self._engine.replicas)

    def pin_prefix(self, prompt: Prompt, cache_salt: str | None = None) -> PinnedPrefix:
        """Keep the KV of a prompt's whole blocks in the pool until `unpin`, computing it if need be, for prompts that
        begin with it and go on (the shared prefix a provider registers; PagedAttention, section 4.4). Of several
        replicas, each keeps it.

        Args:
            cache_salt: as in a prompt's mapping.

        Raises:
            ValueError: the prompt fills no block, prefix caching is off, or the rest of the pool would be too small
                for a sequence of max_model_len tokens.
            RuntimeError: requests are running.
        """
        check_salt(cache_salt)
        parsed = parse_prompt(prompt, self.tokenizer)
        if cache_salt is not None and parsed.cache_salt not in (None, cache_salt):
            raise ValueError(f"cache_salt={cache_salt!r} is not the prompt's own, {parsed.cache_salt!r}")
        return PinnedPrefix(*self._engine.pin_prefix(parsed.token_ids, cache_salt or parsed.cache_salt))

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Let a pinned prefix be evicted again; ValueError when it is not pinned any more."""
        if not isinstance(pinned, PinnedPrefix):
            raise TypeError(f"unpin() takes what pin_prefix() returned, not {pinned!r}")
        self._engine.unpin(pinned.seq_id)

    def memory_report(self, *, peak: bool = False, replica: int = 0) -> MemoryReport:
        """Who holds the pool's blocks; `str()` of it is a table.

        Args:
            peak: as it was in the busiest step so far (to within 5 % of its blocks) instead of now.
            replica: whose pool, of data_parallel_size.

        Raises:
            ValueError: there is no such replica.
        """
        if not 0 <= replica < len(self._engine.replicas):
            raise ValueError(f"replica={replica} is not one of the {len(self._engine.replicas)} replicas")
        one = self._engine.replicas[replica]
        return (one.peak_report if peak else None) or one.memory.report()

    def reset_peak(self) -> None:
        """Forget the busiest step: `memory_report(peak=True)` looks at those from now on."""
        self._engine.reset_peak()

    # ------------------------------------------------------------------ for AsyncLLM

    def lend_engine(self) -> Engine:
        """Hand the engine to the only thread that may touch it until `take_back`; meanwhile the LLM cannot be used.

        Raises:
            RuntimeError: requests are running, or the engine is lent already.
        """
        if self._engine.has_work:
            raise RuntimeError("an AsyncLLM cannot take the engine while requests run")
        engine, self._engine = self._engine, cast(Engine, _Lent())
        return engine

    def take_back(self, engine: Engine) -> None:
        """The engine is nobody else's any more."""
        self._engine = engine


class _Lent:
    """Stands where the engine was."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the engine is in use by an AsyncLLM; shut that down first")
