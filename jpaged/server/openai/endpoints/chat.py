"""`/v1/chat/completions`: whole and streamed answers, and the fields of a message."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jpaged.server.bodies import unhonoured
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError
from jpaged.server.messages.custom_tools import CustomInput
from jpaged.server.openai.bodies.chat import ChatRequest
from jpaged.server.openai.endpoints.common import FINGERPRINT, Usage, added
from jpaged.server.openai.logprobs import chat_logprobs, prompt_logprobs
from jpaged.server.openapi import GENERATES
from jpaged.server.serving import Serving, serving_of
from jpaged.server.streaming import DONE, STREAMED, Events, answered
from jpaged.server.turn import Arguments, CallBegun, Ended, Event, Piece, Step, Text, Thought

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, responses=STREAMED | GENERATES)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Write the next message of a conversation."""
    serving = serving_of(request)
    caller = serving.begin(request)
    serving.check_model(body.model)
    answer, patience = _Chat(serving, body, caller), serving.settings.stall_timeout
    return await answered(request, caller, answer, streamed=bool(body.stream), stall_timeout=patience)


class _Chat:
    """One answer."""

    def __init__(self, serving: Serving, body: ChatRequest, caller: Caller) -> None:
        self._serving = serving
        self._body = body
        self._caller = caller
        self._check()
        engine = serving.engine
        self._form = serving.form_of(body.turn(engine.get_default_sampling_params(), engine.max_model_len))
        named = serving.not_honoured(unhonoured(body) | self._form.unhonoured)
        for name in ("user", "safety_identifier"):
            if getattr(body, name) is not None:
                caller.log[name] = getattr(body, name)
        self._head = {
            "id": f"chatcmpl-{caller.answer_id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or serving.settings.model,
            "system_fingerprint": FINGERPRINT,
            "service_tier": "default",
            **named,
        }

    def _check(self) -> None:
        body = self._body
        if body.top_logprobs is not None and not body.logprobs:
            message = f"top_logprobs={body.top_logprobs} needs logprobs=true"
            raise ApiError(message, param="top_logprobs", code="invalid_value")
        if body.stream and body.prompt_logprobs is not None:
            message = f"prompt_logprobs={body.prompt_logprobs} needs stream=false"
            raise ApiError(message, param="prompt_logprobs", code="invalid_value")
        if body.use_beam_search and body.logprobs:
            message = "logprobs=true has no meaning with use_beam_search=true"
            raise ApiError(message, param="logprobs", code="invalid_value")

    async def whole(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        usage, each = Usage(), dict[int, _Message]()
        tokens: dict[int, list[Piece]] = {}
        async with aclosing(await self._serving.answer(self._form, self._caller)) as steps:
            async for step in steps:
                _count(usage, step)
                for piece in step.pieces:
                    self._message(each, piece).add(piece)
                    tokens.setdefault(piece.index, []).append(piece)
        choices = [self._choice(index, each[index], tokens[index]) for index in sorted(each)]
        usage.thought = added(message.thought_tokens for message in each.values())
        answer: dict[str, Any] = {**self._head, "choices": choices, "usage": usage.now()}
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(step.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = step.prompt_token_ids
        return answer

    def _choice(self, index: int, message: _Message, pieces: Sequence[Piece]) -> dict[str, Any]:
        found = {"index": index, "message": message.whole(), "logprobs": None, **_ending(pieces[-1].ended)}
        if pieces[0].logprobs is not None:
            found["logprobs"] = {"content": [one for piece in pieces for one in self._logprobs(piece)["content"]]}
        token_ids = [token for piece in pieces for token in piece.token_ids]
        return found | ({"token_ids": token_ids} if self._body.return_token_ids else {})

    def _message(self, each: dict[int, _Message], piece: Piece) -> _Message:
        if piece.index not in each:
            shows = self._form.turn.shows_thoughts
            each[piece.index] = _Message(f"call_{self._caller.answer_id}_{piece.index}", self._form.custom, shows=shows)
        return each[piece.index]

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        assert piece.logprobs is not None
        tokenizer = self._serving.engine.tokenizer
        return chat_logprobs(piece.token_ids, piece.logprobs, self._body.top_logprobs or 0, tokenizer)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        options = self._body.stream_options
        counted = Usage(
            include=options is not None and options.include_usage,
            continuous=options is not None and options.continuous_usage_stats,
        )
        each: dict[int, _Message] = {}
        event = Events(self._head)
        async with aclosing(await self._serving.answer(self._form, self._caller)) as steps:
            async for step in steps:
                _count(counted, step)
                for piece in step.pieces:
                    if piece.index not in each:
                        first = {"index": piece.index, "delta": {"role": "assistant", "content": ""}}
                        choice = {**first, "logprobs": None, "finish_reason": None}
                        prompt = {"prompt_token_ids": step.prompt_token_ids} if self._body.return_token_ids else {}
                        yield event({"choices": [choice], **prompt, **counted.field()})
                    delta = self._delta(self._message(each, piece), piece)
                    if counted.include:
                        counted.thought = added(message.thought_tokens for message in each.values())
                    if delta is not None:
                        yield event({"choices": [delta], **counted.field()})
        if counted.include:
            yield event({"choices": [], "usage": counted.now()})
        yield DONE

    def _delta(self, message: _Message, piece: Piece) -> dict[str, Any] | None:
        delta = message.add(piece)
        if not (delta or piece.ended or piece.logprobs or self._body.return_token_ids):
            return None
        logprobs = None if piece.logprobs is None else self._logprobs(piece)
        choice = {"index": piece.index, "delta": delta, "logprobs": logprobs, **_ending(piece.ended)}
        return choice | ({"token_ids": list(piece.token_ids)} if self._body.return_token_ids else {})


def _count(usage: Usage, step: Step) -> None:
    new = sum(len(piece.token_ids) for piece in step.pieces)
    usage.count(0, len(step.prompt_token_ids), step.cached_tokens, new, step.cache.by_tier)


def _ending(ended: Ended | None) -> dict[str, Any]:
    """Return the fields of an answer's end; `stop_reason` is vLLM's."""
    if ended is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": "tool_calls" if ended.reason == "calls" else ended.reason, "stop_reason": ended.stop}


class _Message:
    """Collects one answer's message and returns what each piece adds to it.

    Args:
        prefix: prefix of the ids of its calls.
        custom: names of the tools whose calls have an input in place of arguments.
        shows: whether it has the model's thoughts.
    """

    def __init__(self, prefix: str, custom: Collection[str], *, shows: bool) -> None:
        self._prefix = prefix
        self._custom = custom
        self._shows = shows
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._input: CustomInput | None = None  # of the last call, if its tool is a custom one
        self.thought_tokens: int | None = None

    def add(self, piece: Piece) -> dict[str, Any]:
        """Add more of the answer; return the `delta` of a chunk, empty if nothing is settled."""
        self.thought_tokens = piece.thought_tokens
        delta: dict[str, Any] = {}
        for event in piece.events:
            self._add(event, delta)
        return delta

    def _add(self, event: Event, delta: dict[str, Any]) -> None:
        if isinstance(event, Text):
            self._content.append(event.text)
            delta["content"] = delta.get("content", "") + event.text
        elif isinstance(event, Thought):
            if self._shows:
                self._reasoning.append(event.text)
                delta["reasoning_content"] = delta.get("reasoning_content", "") + event.text
        elif isinstance(event, CallBegun):
            custom = event.name in self._custom
            self._input = CustomInput() if custom else None
            kind, text = ("custom", "input") if custom else ("function", "arguments")
            called = {"name": event.name, text: ""}
            call = {"id": f"{self._prefix}_{event.index}", "type": kind, kind: called}
            self._calls.append({**call, kind: {**called}})
            delta.setdefault("tool_calls", []).append({"index": event.index, **call})
        elif isinstance(event, Arguments):
            kind, text = ("function", "arguments") if self._input is None else ("custom", "input")
            new = event.text if self._input is None else self._input.push(event.text)
            if not new:
                return
            self._calls[event.index][kind][text] += new
            calls = delta.setdefault("tool_calls", [])
            if calls and calls[-1]["index"] == event.index:
                calls[-1][kind][text] += new
            else:
                calls.append({"index": event.index, kind: {text: new}})

    def whole(self) -> dict[str, Any]:
        """Return the whole message."""
        content: str | None = "".join(self._content)
        if self._calls and not content:
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message
