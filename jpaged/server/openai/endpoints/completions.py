"""`/v1/completions`: whole and streamed answers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import takewhile
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jpaged import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from jpaged.server.bodies import unhonoured
from jpaged.server.cache_use import split
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError
from jpaged.server.openai.bodies.prompts import CompletionRequest
from jpaged.server.openai.endpoints.common import FINGERPRINT, Usage, ending
from jpaged.server.openai.logprobs import HALF, CompletionLogprobs, prompt_logprobs
from jpaged.server.openapi import GENERATES
from jpaged.server.serving import Serving, collected, merged, serving_of
from jpaged.server.streaming import DONE, STREAMED, Events, answered

router = APIRouter()
_MOST_IN_CHARACTER = 16
"""First tokens of an output that may complete the prompt's last character: more than it has bytes."""


@router.post("/v1/completions", response_model=None, responses=STREAMED | GENERATES)
async def complete(body: CompletionRequest, request: Request) -> Response:
    """Continue one or several prompts."""
    serving = serving_of(request)
    caller = serving.begin(request)
    serving.check_model(body.model)
    answer, patience = _Completion(serving, body, caller), serving.settings.stall_timeout
    return await answered(request, caller, answer, streamed=bool(body.stream), stall_timeout=patience)


class _Completion:
    """Answers one request. Choice ``prompt * n + i`` is output i of a prompt."""

    def __init__(self, serving: Serving, body: CompletionRequest, caller: Caller) -> None:
        self._serving = serving
        self._body = body
        self._caller = caller
        self._check()
        self._prompts = body.prompts
        caller.num_prompts = len(self._prompts)
        self._scores_prompt = body.echo and body.logprobs is not None
        caller.log |= {"user": body.user} if body.user else {}
        self._head = {
            "id": f"cmpl-{caller.answer_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or serving.settings.model,
            "system_fingerprint": FINGERPRINT,
            **serving.not_honoured(unhonoured(body)),
        }

    def _check(self) -> None:
        body, most = self._body, self._serving.settings.max_waiting
        if not 1 <= len(body.prompts) <= most:
            raise ApiError(
                f"prompt has {len(body.prompts)} prompts; the server takes 1 to {most} (--max-waiting-requests)",
                param="prompt",
                code="invalid_value",
            )
        self._serving.queue.check_prompts(self._caller.key, len(body.prompts))
        if body.best_of is not None and (body.best_of < body.n or (body.stream and body.best_of > body.n)):
            limit = "at least n" if body.best_of < body.n else "n where stream=true"
            raise ApiError(f"best_of={body.best_of} must be {limit}={body.n}", param="best_of", code="invalid_value")
        if body.max_tokens == 0 and (body.stream or not body.echo):
            raise ApiError("max_tokens=0 needs echo=true and stream=false", param="max_tokens", code="invalid_value")
        if body.stream and body.prompt_logprobs is not None:
            message = f"prompt_logprobs={body.prompt_logprobs} needs stream=false"
            raise ApiError(message, param="prompt_logprobs", code="invalid_value")
        if body.echo and self._serving.engine.tokenizer is None:
            raise ApiError("echo=true needs a tokenizer, and the model has none", param="echo", code="invalid_value")
        plain = (("echo", body.echo), ("best_of", body.best_of), ("add_special_tokens", not body.add_special_tokens))
        for name in [name for name, given in plain if given and body.use_beam_search]:
            raise ApiError(
                f"{name} is not supported with use_beam_search=true", param=name, code="unsupported_parameter"
            )

    def _start(self) -> list[AsyncGenerator[RequestOutput, None]]:
        body = self._body
        params = self._params()
        salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
        special = {} if body.add_special_tokens else {"add_special_tokens": False}
        alone = {"prompt_only": True} if body.max_tokens == 0 else {}
        return [
            self._serving.generate(
                {"prompt": prompt, **salt} if isinstance(prompt, str) else {"prompt_token_ids": prompt, **salt},
                params,
                self._caller,
                model=body.model,
                priority=body.priority,
                refusal=body.refusal,
                **special,
                **alone,
            )
            for prompt in self._prompts
        ]

    def _params(self) -> SamplingParams | BeamSearchParams:
        body, extra = self._body, dict[str, Any]()
        if body.use_beam_search:
            return body.beam_params(most_tokens=body.max_tokens or 16)
        if body.logprobs is not None:
            extra["logprobs"] = body.logprobs
        if self._scores_prompt:
            wanted = (body.logprobs or 0, body.prompt_logprobs or 0)
            extra["prompt_logprobs"] = min(wanted) if min(wanted) < 0 else max(wanted)  # -1 is the whole vocabulary
        if body.best_of is not None:
            extra["n"] = body.best_of
            extra.setdefault("logprobs", 0)  # best_of ranks by log-probability, which the engine may skip otherwise
        if body.max_tokens is not None:
            extra["max_tokens"] = max(1, body.max_tokens)
        if body.thinking_token_budget not in (None, -1):
            extra |= {"reasoning_parser": self._serving.settings.reasoning_parser, "tool_parser": "none"}
        return body.sampling_params(self._serving.engine.get_default_sampling_params(), **extra)

    # ------------------------------------------------------------------ whole

    async def whole(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        outputs = await collected(self._start())
        usage = Usage()
        for prompt, output in enumerate(outputs):
            _count(usage, prompt, output, generated=self._body.max_tokens != 0)
        choices = [
            self._choice(prompt * self._body.n + i, output, one)
            for prompt, output in enumerate(outputs)
            for i, one in enumerate(self._best(output.outputs))
        ]
        return {**self._head, "choices": choices, "usage": usage.now()}

    def _best(self, outputs: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        if self._body.best_of is None:
            return outputs
        return sorted(outputs, key=_mean_logprob, reverse=True)[: self._body.n]

    def _choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        body, generated = self._body, self._body.max_tokens != 0
        text = one.text if generated else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(output, one.token_ids) + text,
            "logprobs": None,
            **ending(one),
        }
        if not generated:
            choice |= {"finish_reason": "length", "stop_reason": None}
        if body.logprobs is not None:
            piece = self._scores(body.logprobs, output)
            tokens, entries = (list(one.token_ids), list(one.logprobs or ())) if generated else ([], [])
            if self._scores_prompt:
                tokens, entries = [*output.prompt_token_ids, *tokens], [*(output.prompt_logprobs or ()), *entries]
            choice["logprobs"] = piece.piece(tokens, entries, **self._unscored(output))
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = list(one.token_ids) if generated else []
        return choice

    def _echo(self, output: RequestOutput, token_ids: Sequence[int] = ()) -> str:
        """Return the prompt's text, without a character in which it ends if the output's first tokens complete it."""
        if not self._body.echo:
            return ""
        if output.prompt is not None:
            return output.prompt
        tokenizer, prompt = self._serving.engine.tokenizer, output.prompt_token_ids
        text = tokenizer.decode(prompt)
        if not text.endswith(HALF) or self._body.max_tokens == 0:
            return text
        both = tokenizer.decode([*prompt, *token_ids[:_MOST_IN_CHARACTER]])
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, both, strict=False))
        return "".join(character for character, _ in same)

    def _scores(self, num_top: int, output: RequestOutput) -> CompletionLogprobs:
        tokenizer = self._serving.engine.tokenizer
        hidden = () if self._body.skip_special_tokens is False else self._serving.hidden_tokens
        return CompletionLogprobs(num_top, tokenizer, hidden, () if self._scores_prompt else output.prompt_token_ids)

    def _unscored(self, output: RequestOutput) -> dict[str, Any]:
        """Return the number of the prompt's tokens, the text of the first, which has no log-probability, and the
        prompt's text."""
        if not self._scores_prompt:
            return {}
        first = self._serving.engine.tokenizer.decode(output.prompt_token_ids[:1])
        return {"num_prompt": len(output.prompt_token_ids), "first": first, "echo": self._echo(output)}

    # ------------------------------------------------------------------ streamed

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        body, options = self._body, self._body.stream_options
        counted = Usage(
            include=options is not None and options.include_usage,
            continuous=options is not None and options.continuous_usage_stats,
        )
        pieces: dict[int, CompletionLogprobs] = {}
        begun: set[int] = set()
        halves: dict[int, tuple[str, list[int]]] = {}  # what of the echo is sent, and tokens that may complete its end
        scored: dict[int, Any] = {}
        event = Events(self._head)
        async with aclosing(merged(self._start())) as outputs:
            async for prompt, output in outputs:
                _count(counted, prompt, output)
                scored[prompt] = output.prompt_logprobs or scored.get(prompt) or ()
                for one in output.outputs:
                    index = prompt * body.n + one.index
                    text, entries = one.text, list(one.logprobs or ())
                    tokens: list[int] = list(one.token_ids)
                    first = index not in begun
                    begun.add(index)
                    if first and body.echo:
                        echo = self._echo(output, tokens)
                        if echo.endswith(HALF) and not text:
                            echo = echo.rstrip(HALF)
                            halves[index] = echo, []
                        text = echo + text
                        if self._scores_prompt:
                            tokens = [*output.prompt_token_ids, *tokens]
                            entries = [*scored[prompt], *entries]
                    if index in halves:
                        sent, after = halves[index]
                        after += one.token_ids
                        if one.text or one.finish_reason:
                            text = self._echo(output, after).removeprefix(sent) + one.text
                            del halves[index]
                            text = sent + text if first else text
                    if not (text or one.finish_reason or entries or body.return_token_ids):
                        continue
                    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, **ending(one)}
                    if body.logprobs is not None:
                        if (piece := pieces.get(index)) is None:
                            piece = pieces[index] = self._scores(body.logprobs, output)
                        unscored = self._unscored(output) if first else {}
                        choice["logprobs"] = piece.piece(tokens, entries, **unscored)
                    if body.return_token_ids:
                        choice["token_ids"] = list(one.token_ids)
                        if first:
                            choice["prompt_token_ids"] = output.prompt_token_ids
                    yield event({"choices": [choice], **counted.field()})
        if counted.include:
            yield event({"choices": [], "usage": counted.now()})
        yield DONE


def _count(usage: Usage, prompt: int, output: RequestOutput, *, generated: bool = True) -> None:
    """Count an output of the engine; without `generated` its tokens are not the answer's."""
    tokens = sum(len(one.token_ids) for one in output.outputs) if generated else 0
    usage.count(prompt, len(output.prompt_token_ids), output.num_cached_tokens, tokens, split(output))


def _mean_logprob(output: CompletionOutput) -> float:
    """Return the mean log-probability of an output's tokens, by which `best_of` chooses."""
    assert output.cumulative_logprob is not None, "best_of asks the engine for log-probabilities"
    return output.cumulative_logprob / max(1, len(output.token_ids))
