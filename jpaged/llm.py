"""The public Python API: offline generation with vLLM's names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Literal, cast

from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.memory import MemoryReport
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.progress import GenerationProgress, warmup_progress
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request
from jpaged.scheduling import Sequence as GeneratedSequence

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any] | Sequence[int]
OnError = Literal["raise", "return"]


class LLM:
    """A language model with paged KV memory.

    >>> llm = LLM("smollm2-135m")                                            # doctest: +SKIP
    >>> llm.generate(["The capital of France is"])[0].outputs[0].text        # doctest: +SKIP

    Args:
        model: alias (``smollm2-135m``), hub id, Hugging Face folder, ``.gguf`` file or saved checkpoint.
        settings: see `EngineConfig`.

    Raises:
        ValueError: a setting is out of its range, or the model or its pool does not fit; the message names the
            value and the limit.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        from jpaged.build import build_engine  # imports jax, which takes a second

        self.config = EngineConfig(model=str(model), **settings)
        built = build_engine(self.config)
        self.model_config = built.model_config
        self.tokenizer = built.tokenizer
        self._engine: Engine = built.engine

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Generate for a batch of prompts; outputs come in the order of the prompts.

        Args:
            prompts: one or several of: text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``. A mapping may
                hold ``"cache_salt"``: prompts share cached KV only with those of the same salt.
            sampling_params: one for all, or one each; None = `SamplingParams()`.
            priority: one for all, or one each; lower is served first. Needs ``scheduling_policy="priority"``.
            use_tqdm: show a progress bar.
            on_error: "raise" refuses the whole batch for one bad prompt before anything runs; "return" runs the
                others and gives the bad one a RequestOutput with `error`.

        Raises:
            ValueError: a prompt is empty, too long for max_model_len, or could never fit the pool; or a priority
                is given where requests are served in order of arrival.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error={on_error!r} is not 'raise' or 'return'")
        batch = _several(prompts)
        params = _one_each(sampling_params, len(batch))
        priorities = _priorities(priority, len(batch))
        entries: list[Request | RequestOutput] = []
        queued: list[Request] = []
        try:
            for prompt, param, rank in zip(batch, params, priorities, strict=True):
                try:
                    request = self._make_request(prompt, param, rank)
                    self._engine.add(request)
                    queued.append(request)
                    entries.append(request)
                except ValueError as error:
                    if on_error == "raise":
                        raise ValueError(f"prompt {len(entries)}: {error}") from error
                    entries.append(_refused(prompt, str(error)))
            self._run(queued, use_tqdm)
        finally:
            for request in queued:  # leaves nothing behind when a prompt was refused or the user interrupted
                self._engine.abort(request)
            self._engine.drain()
        return [self._output(entry) if isinstance(entry, Request) else entry for entry in entries]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Generate the next turn of one or several conversations, through the model's chat template.

        Args:
            messages: a conversation (``[{"role": ..., "content": ...}, ...]``) or a list of them.
            add_generation_prompt: end the prompt where the assistant's turn begins.

        Raises:
            ValueError: the model has no chat template, or as `generate`.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise ValueError(f"{self.config.model} has no chat template")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            ids = self.tokenizer.encode(text, add_special_tokens=False)  # the template wrote its own
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_error=on_error)

    def _run(self, requests: list[Request], show: bool) -> None:
        with GenerationProgress(len(requests), show) as progress:
            while self._engine.has_work:
                finished = self._engine.step()
                progress.update(finished, self._engine.stats)

    def _make_request(self, prompt: Prompt, params: SamplingParams, priority: int | None = None) -> Request:
        text, ids, salt = None, None, None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
            if unknown or (text is None and ids is None):
                raise ValueError(f"a prompt has 'prompt' or 'prompt_token_ids', not {sorted(unknown) or 'nothing'}")
            if salt is not None and not (isinstance(salt, str) and salt):
                raise ValueError(f"cache_salt={salt!r} must be a non-empty string")
        else:
            ids = prompt
        if ids is None:
            if self.tokenizer is None:
                raise ValueError(f"{self.config.model} has no tokenizer: give prompt_token_ids")
            ids = self.tokenizer.encode(text)
        try:
            token_ids = [index(token) for token in ids]
        except TypeError as error:
            raise ValueError(f"prompt_token_ids={ids!r} must be integers") from error
        return self._engine.make_request(token_ids, params, text, priority=priority, cache_salt=salt)

    def _output(self, request: Request) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._completion(request, seq) for seq in request.sequences],
            finished=True,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics(),
        )

    def _completion(self, request: Request, seq: GeneratedSequence) -> CompletionOutput:
        ids, text, params = seq.output_token_ids, seq.text, request.params
        if text is None and params.detokenize and self.tokenizer is not None:
            text = self.tokenizer.decode(request.text_tokens(seq), skip_special_tokens=params.skip_special_tokens)
        return CompletionOutput(seq.index, text or "", ids, seq.cumulative_logprob, seq.finish_reason, seq.stop_reason)

    # ------------------------------------------------------------------ the engine's state

    def warmup(self, *, use_tqdm: bool = True) -> int:
        """Compile every shape the engine can meet; returns how many. Later compilations count as recompiles."""
        if self._engine.has_work:
            raise RuntimeError("warmup() while requests run")
        runner = self._engine.runner
        with warmup_progress(runner.num_warmup, use_tqdm) as advance:
            for name in runner.warmup():
                advance(name)
        return runner.num_compiled

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
        """Of weights, activations and KV."""
        return self._engine.runner.spec.dtype

    @property
    def num_recompiles(self) -> int:
        """Shapes compiled after `warmup`."""
        return self._engine.runner.num_recompiles

    @property
    def params(self) -> Any:
        """The weights: a pytree of sharded arrays."""
        return self._engine.runner.params

    def update_params(self, new: Any) -> None:
        """Swap the weights in place, as an RL loop does after each optimiser step.

        Args:
            new: same structure, shapes and dtypes as `params`; placed on the engine's devices as they are.

        Raises:
            ValueError: naming the first leaf that differs; the old weights stay.
            RuntimeError: requests are running, whose cached KV belongs to the old weights.
        """
        if self._engine.has_work:
            raise RuntimeError("update_params() while requests run")
        self._engine.runner.update_params(new)
        self._engine.memory.reset_prefix_cache()  # cached KV belongs to the old weights

    def memory_report(self, *, peak: bool = False) -> MemoryReport:
        """Who holds the pool's blocks; `str()` of it is a table.

        Args:
            peak: as it was in the busiest step so far (to within 5 % of its blocks) instead of now.
        """
        return (self._engine.peak_report if peak else None) or self._engine.memory.report()


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A batch as it is, a single prompt (text, mapping or token ids) as a batch of one."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts")
    return params


def _priorities(priority: int | Sequence[int] | None, count: int) -> Sequence[int | None]:
    if priority is None:
        return [None] * count
    each = [priority] * count if isinstance(priority, int) else priority
    if len(each) != count:
        raise ValueError(f"{len(each)} priorities for {count} prompts")
    for value in each:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"priority={value!r} must be an integer")
    return each


def _refused(prompt: Prompt, error: str) -> RequestOutput:
    text, ids = (prompt, []) if isinstance(prompt, str) else (None, [])
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), list(prompt.get("prompt_token_ids") or [])
    elif not isinstance(prompt, str):
        ids = list(prompt)
    return RequestOutput(request_id=-1, prompt=text, prompt_token_ids=ids, error=error)
