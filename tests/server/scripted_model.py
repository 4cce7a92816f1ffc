"""An `AsyncLLM` without a model: each request's output follows a script that the conversation names."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from tiny_chat_model import byte_level_tokenizer

from jpaged import BeamSearchParams, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from jpaged.outputs import Logprob


@dataclass
class Script:
    """Says what the model writes: for each output its pieces, each a token, and how it ends."""

    pieces: tuple[str, ...]
    reason: str = "stop"
    stop: str | int | None = None
    fails: Exception | None = field(default=None, compare=False)


class ScriptedModel:
    """Answers what a server asks of an engine. A prompt with ``#NAME#`` in it gets the script of that name.

    Attributes:
        prompts, params: what the engine was given, in order.
    """

    adapters: tuple[str, ...] = ()
    restored_requests: frozenset[str] = frozenset()
    max_model_len = 400
    max_media_bytes = 0

    def __init__(self, scripts: dict[str, Script]) -> None:
        self.scripts = scripts
        self.config = SimpleNamespace(max_num_seqs=8, data_parallel_size=1)
        self.tokenizer = byte_level_tokenizer()
        self.prompts, self.params = [], []

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.0)

    def get_metrics(self):
        return []

    def chat_prompt(self, messages, *, max_tokens=None, truncate_prompt_tokens=None, **options):
        shown = {name: value for name, value in options.items() if value is not None}
        text = json.dumps([messages, shown], sort_keys=True)
        thinks = "<think>" if any("#begun" in str(one.get("content")) for one in messages) else ""
        self.prompts.append([messages, shown, truncate_prompt_tokens])
        tokens = list(range(len(text.split(" "))))
        if len(tokens) > self.max_model_len:
            raise ValueError(f"the prompt has {len(tokens)} tokens, more than max_model_len={self.max_model_len}")
        return {"prompt": text + thinks, "prompt_token_ids": tokens[-(truncate_prompt_tokens or len(tokens)) :]}

    async def generate(self, prompt, params, name, **options):
        if isinstance(params, SamplingParams) and params.max_tokens == 399:
            raise ValueError(f"max_tokens={params.max_tokens} does not fit")
        self.params.append(params)
        text = str(prompt.get("prompt"))
        script = self.scripts[text.split("#")[1]]
        tokens = prompt.get("prompt_token_ids", list(range(len(text.split(" ")))))
        head = RequestOutput(name, prompt.get("prompt"), tokens, num_cached_tokens=len(tokens) // 2)
        n = params.n
        if params.output_kind is RequestOutputKind.DELTA:
            for at in range(len(script.pieces)):
                await asyncio.sleep(0)
                if script.fails is not None and at == len(script.pieces) - 1:
                    raise script.fails
                last = at == len(script.pieces) - 1
                each = [self._output(script, params, i, at, at + 1) for i in range(n)]
                yield replace(head, outputs=each, finished=last)
        else:
            if script.fails is not None:
                raise script.fails
            each = [self._output(script, params, i, 0, len(script.pieces)) for i in range(n)]
            scores = (
                None if params.prompt_logprobs is None else [None, *({t: Logprob(-0.5, 1, "p")} for t in tokens[1:])]
            )
            yield replace(head, outputs=each, prompt_logprobs=scores)

    async def beam_search(self, prompt, params: BeamSearchParams, name, **options):
        script = self.scripts[str(prompt["prompt"]).split("#")[1]]
        text = "".join(script.pieces)
        tokens = list(range(len(script.pieces)))
        each = [CompletionOutput(i, text, tokens, -1.0, "length", score=-0.5) for i in range(params.beam_width)]
        return RequestOutput(name, prompt["prompt"], prompt["prompt_token_ids"], each)

    def _output(self, script, params, index, start, end):
        pieces = script.pieces[start:end]
        last = end == len(script.pieces)
        ids = [100 + at for at in range(start, end)]
        scores = None
        if params.logprobs is not None:
            scores = [
                {token: Logprob(-0.25, 1, piece), 7: Logprob(-1.5, 2, "é\ufffd")}
                for token, piece in zip(ids, pieces, strict=True)
            ]
        reason = script.reason if last else None
        return CompletionOutput(index, "".join(pieces), ids, -1.0, reason, script.stop if last else None, scores)

    def stats(self):
        raise NotImplementedError

    async def abort(self, name):
        pass
