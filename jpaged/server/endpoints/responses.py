"""`/v1/responses`, without what OpenAI stores for its callers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jpaged import CompletionOutput, RequestOutput
from jpaged.server.caller import Caller
from jpaged.server.endpoints.common import serving_of
from jpaged.server.endpoints.turn import start_turn
from jpaged.server.errors import ApiError, described
from jpaged.server.message.conversation import Turn
from jpaged.server.message.items import Event, Items
from jpaged.server.protocol.responses import ResponsesRequest
from jpaged.server.protocol.sampling import check_model
from jpaged.server.serving import Serving, collected
from jpaged.server.streaming import event, stream, while_connected, whole

router = APIRouter()


@router.post("/v1/responses", response_model=None)
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Write a response."""
    serving = serving_of(request)
    caller = serving.begin(request)
    check_model(body.model, serving.settings.names)
    answer = _Response(serving, body, caller)
    if body.stream:
        return await stream(request, caller, answer.chunks(), serving.settings.stall_timeout)
    return whole(await while_connected(request, caller, answer.whole()))


class _Response:
    """One response."""

    def __init__(self, serving: Serving, body: ResponsesRequest, caller: Caller) -> None:
        self._serving = serving
        self._caller = caller
        self._body = body
        self._chat = body.as_chat()
        self._turn = Turn(self._chat, serving.settings, serving.engine.tokenizer)
        self._items = Items(caller.request_id)
        self._number = 0
        for name in ("user", "safety_identifier"):
            if getattr(body, name) is not None:
                caller.log[name] = getattr(body, name)
        self._head = self._about(body)

    def _about(self, body: ResponsesRequest) -> dict[str, Any]:
        """Return what a response repeats of its request."""
        defaults = self._serving.engine.get_default_sampling_params()
        form = None if body.text is None else body.text.format
        choice = body.tool_choice
        return {
            "id": f"resp_{self._caller.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model or self._serving.settings.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": defaults.temperature if body.temperature is None else body.temperature,
            "top_p": defaults.top_p if body.top_p is None else body.top_p,
            "parallel_tool_calls": body.parallel_tool_calls,
            "tool_choice": choice if choice is None or isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "truncation": "disabled",
            "store": False,
            "service_tier": "default",
            "metadata": {},
        } | ({"tool_choice": "auto"} if choice is None else {})

    async def whole(self) -> dict[str, Any]:
        """Return the response's JSON."""
        outputs = await start_turn(self._serving, self._chat, self._turn, self._caller)
        (output,) = await collected([outputs])
        reader, one = self._turn.reader(), output.outputs[0]
        for part in [*reader.push(one.text), *reader.finish()]:
            list(self._items.add(part))
        list(self._items.close(_status(one)))
        return self._ended(output, one, len(one.token_ids))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events."""
        outputs = await start_turn(self._serving, self._chat, self._turn, self._caller)
        reader, tokens, begun = self._turn.reader(), 0, False
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    if not begun:
                        begun = True
                        yield self._event("response.created", {"response": self._state("in_progress")})
                        yield self._event("response.in_progress", {"response": self._state("in_progress")})
                    for one in output.outputs:
                        tokens += len(one.token_ids)
                        parts = reader.push(one.text) + (reader.finish() if one.finish_reason else [])
                        for part in parts:
                            for told in self._items.add(part):
                                yield self._event(*told)
                        if one.finish_reason is not None:
                            for told in self._items.close(_status(one)):
                                yield self._event(*told)
                            yield self._event(*self._last(output, one, tokens))
            except Exception as error:
                if not begun:
                    raise
                told_error = described(error)
                self._caller.log["error"] = told_error.code
                failed = {**self._state("failed"), "error": _error(told_error)}
                yield self._event("response.failed", {"response": failed})

    def _last(self, output: RequestOutput, one: CompletionOutput, tokens: int) -> Event:
        ended = self._ended(output, one, tokens)
        return f"response.{ended['status']}", {"response": ended}

    def _ended(self, output: RequestOutput, one: CompletionOutput, tokens: int) -> dict[str, Any]:
        """Return the response at its end."""
        whole = one.finish_reason == "stop"
        why = "max_output_tokens" if one.finish_reason == "length" else "aborted"
        prompt = len(output.prompt_token_ids)
        return {
            **self._state(_status(one)),
            "incomplete_details": None if whole else {"reason": why},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + tokens,
            },
        }

    def _state(self, status: str) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "output": list(self._items.all),
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)


def _status(one: CompletionOutput) -> str:
    return "completed" if one.finish_reason == "stop" else "incomplete"


def _error(error: ApiError) -> dict[str, Any]:
    return {"code": error.code or "server_error", "message": error.message}
