"""`/v1/chat/completions`: whole and streamed answers, and the fields of a message."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jpaged import CompletionOutput
from jpaged.server.bodies import check_model, unhonoured
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError
from jpaged.server.messages.chat_turn import ChatTurn
from jpaged.server.messages.custom_tools import CustomInput
from jpaged.server.messages.parts import CallArguments, CallCut, CallStart, Content, Part, Reasoning
from jpaged.server.openai.bodies.chat import ChatRequest
from jpaged.server.openai.endpoints.common import FINGERPRINT, StreamUsage, added, ending, usage
from jpaged.server.openai.logprobs import chat_logprobs, prompt_logprobs
from jpaged.server.openapi import GENERATES
from jpaged.server.serving import Serving, collected, serving_of
from jpaged.server.streaming import DONE, STREAMED, Events, stream, while_connected, whole

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None, responses=STREAMED | GENERATES)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Write the next message of a conversation."""
    serving = serving_of(request)
    caller = serving.begin(request)
    check_model(body.model, serving.names)
    answer = _Chat(serving, body, caller)
    if body.stream:
        return await stream(request, caller, answer.chunks(), serving.settings.stall_timeout)
    return whole(await while_connected(request, caller, answer.whole()))


class _Chat:
    """One answer."""

    def __init__(self, serving: Serving, body: ChatRequest, caller: Caller) -> None:
        self._serving = serving
        self._body = body
        self._caller = caller
        self._check()
        self._turn = serving.turn_of(body)
        named = serving.not_honoured(unhonoured(body) | self._turn.unhonoured)
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

    # ------------------------------------------------------------------ whole

    async def whole(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        (output,) = await collected([await self._serving.start_turn(self._body, self._turn, self._caller)])
        tokens = sum(len(one.token_ids) for one in output.outputs)
        each = [MessageFields(self._turn, i, self._caller.answer_id) for i in range(len(output.outputs))]
        pairs = zip(each, output.outputs, strict=True)
        choices = [self._choice(fields, i, one) for i, (fields, one) in enumerate(pairs)]
        answer: dict[str, Any] = {**self._head, "choices": choices}
        answer["usage"] = usage([output], tokens, added(fields.thought_tokens for fields in each))
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def _choice(self, fields: MessageFields, index: int, one: CompletionOutput) -> dict[str, Any]:
        fields.add(one.text, one.token_ids, ended=True)
        choice = {"index": index, "message": fields.message(), "logprobs": self._logprobs(one)}
        choice |= fields.ending(ending(one))
        return choice | ({"token_ids": list(one.token_ids)} if self._body.return_token_ids else {})

    def _logprobs(self, one: CompletionOutput) -> dict[str, Any] | None:
        if one.logprobs is None:
            return None
        tokenizer = self._serving.engine.tokenizer
        return chat_logprobs(one.token_ids, one.logprobs, self._body.top_logprobs or 0, tokenizer)

    # ------------------------------------------------------------------ streamed

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events."""
        options = self._body.stream_options
        counted = StreamUsage(
            include=options is not None and options.include_usage,
            continuous=options is not None and options.continuous_usage_stats,
        )
        each: dict[int, MessageFields] = {}
        event = Events(self._head)
        async with aclosing(await self._serving.start_turn(self._body, self._turn, self._caller)) as outputs:
            async for output in outputs:
                counted.count(0, output)
                for one in output.outputs:
                    if one.index not in each:
                        each[one.index] = MessageFields(self._turn, one.index, self._caller.answer_id)
                        first = {"index": one.index, "delta": {"role": "assistant", "content": ""}}
                        choice = {**first, "logprobs": None, "finish_reason": None}
                        prompt = {"prompt_token_ids": output.prompt_token_ids} if self._body.return_token_ids else {}
                        yield event({"choices": [choice], **prompt, **counted.field()})
                    delta = self._delta(each[one.index], one)
                    if counted.include:
                        counted.thought = added(fields.thought_tokens for fields in each.values())
                    if delta is not None:
                        yield event({"choices": [delta], **counted.field()})
        if counted.include:
            yield event({"choices": [], "usage": counted.now()})
        yield DONE

    def _delta(self, fields: MessageFields, one: CompletionOutput) -> dict[str, Any] | None:
        delta = fields.add(one.text, one.token_ids, ended=one.finish_reason is not None)
        if not (delta or one.finish_reason or one.logprobs or self._body.return_token_ids):
            return None
        choice = {"index": one.index, "delta": delta, "logprobs": self._logprobs(one), **fields.ending(ending(one))}
        return choice | ({"token_ids": list(one.token_ids)} if self._body.return_token_ids else {})


class MessageFields:
    """Collects one output's message and returns what each piece of text adds to it.

    Args:
        turn: makes the reader of its text.
        index: number of the choice.
        answer_id: prefix of the ids of its tool calls.
    """

    def __init__(self, turn: ChatTurn, index: int, answer_id: str) -> None:
        self._turn = turn
        self._reader = turn.reader()
        self._thought = turn.thought_tokens(self._reader)
        self._id = f"call_{answer_id}_{index}"
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._input: CustomInput | None = None  # of the last call, if its tool is a custom one
        self._is_cut = False  # whether the output ended within a call

    @property
    def thought_tokens(self) -> int | None:
        """Return the tokens of its thought so far; None if thoughts are not split off."""
        return None if self._thought is None else self._thought.total

    def add(self, text: str, token_ids: Sequence[int], *, ended: bool) -> dict[str, Any]:
        """Add more of the output; return the `delta` of a chunk, empty if no part is settled."""
        parts = self._reader.push(text)
        if ended:
            parts = [*parts, *self._reader.finish()]
        if self._thought is not None:
            self._thought.add(token_ids, text)
        delta: dict[str, Any] = {}
        for part in parts:
            self._add(part, delta)
        return delta

    def _add(self, part: Part, delta: dict[str, Any]) -> None:
        if isinstance(part, Content):
            self._content.append(part.text)
            delta["content"] = delta.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            if self._turn.include_reasoning:
                self._reasoning.append(part.text)
                delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
        elif isinstance(part, CallStart):
            custom = part.name in self._turn.custom
            self._input = CustomInput() if custom else None
            kind, text = ("custom", "input") if custom else ("function", "arguments")
            called = {"name": part.name, text: ""}
            call = {"id": f"{self._id}_{part.index}", "type": kind, kind: called}
            self._calls.append({**call, kind: {**called}})
            delta.setdefault("tool_calls", []).append({"index": part.index, **call})
        elif isinstance(part, CallCut):
            self._is_cut = True
        elif isinstance(part, CallArguments):
            kind, text = ("function", "arguments") if self._input is None else ("custom", "input")
            new = part.text if self._input is None else self._input.push(part.text)
            if not new:
                return
            self._calls[part.index][kind][text] += new
            calls = delta.setdefault("tool_calls", [])
            if calls and calls[-1]["index"] == part.index:
                calls[-1][kind][text] += new
            else:
                calls.append({"index": part.index, kind: {text: new}})

    def message(self) -> dict[str, Any]:
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

    def ending(self, ending: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the message's end: "tool_calls" if it has calls and none was cut off."""
        if self._calls and not self._is_cut and ending["finish_reason"] == "stop":
            return {**ending, "finish_reason": "tool_calls"}
        return ending
