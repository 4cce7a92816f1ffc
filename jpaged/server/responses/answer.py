"""One response: what it repeats of its request, and the events by which it grows."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from jpaged import CompletionOutput, RequestOutput
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError, described
from jpaged.server.logprobs import chat_logprobs
from jpaged.server.message.conversation import Turn
from jpaged.server.message.items import Event, Items
from jpaged.server.protocol.responses import ResponsesRequest
from jpaged.server.serving import Serving
from jpaged.server.turn import start_turn


class Answer:
    """The answer to one request.

    Args:
        response_id: its id.
        created: when it was asked for, in seconds since 1970; None = now.

    Attributes:
        error: what went wrong after the first event.

    Raises:
        ApiError: a field is refused.
    """

    def __init__(
        self, serving: Serving, body: ResponsesRequest, caller: Caller, response_id: str, created: int | None = None
    ) -> None:
        self._serving = serving
        self._caller = caller
        self._body = body
        self._chat = body.as_chat()
        self._turn = Turn(self._chat, serving.settings, serving.engine.tokenizer)
        if body.tells_logprobs and self._turn.splits:
            message = "include has logprobs of a text that is read for tool calls or thoughts, which is not done"
            raise ApiError(message, param="include", code="unsupported_parameter")
        self._items = Items(caller.request_id)
        self._id = response_id
        self._created = int(time.time()) if created is None else created
        for name in ("user", "safety_identifier"):
            if getattr(body, name) is not None:
                caller.log[name] = getattr(body, name)
        self._head = self._about(body)
        self.error: Exception | None = None

    def _about(self, body: ResponsesRequest) -> dict[str, Any]:
        """Return what a response repeats of its request."""
        defaults = self._serving.engine.get_default_sampling_params()
        form = None if body.text is None else body.text.format
        choice = body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
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
            "store": body.is_stored,
            "background": body.background,
            "previous_response_id": body.previous_response_id,
            "top_logprobs": body.top_logprobs or 0,
            "service_tier": "default",
            "metadata": body.metadata or {},
        } | ({"tool_choice": "auto"} if choice is None else {})

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of the response.

        Raises:
            ApiError: it is refused, before the first event; what fails later is told by an event.
        """
        outputs = await start_turn(self._serving, self._chat, self._turn, self._caller)
        reader, tokens, begun = self._turn.reader(), 0, False
        thought = self._turn.thought_tokens(reader)
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    if not begun:
                        begun = True
                        yield "response.created", {"response": self.state("in_progress")}
                        yield "response.in_progress", {"response": self.state("in_progress")}
                    for one in output.outputs:
                        tokens += len(one.token_ids)
                        self._items.scored(self._logprobs(one))
                        text = _sure(one)
                        parts = reader.push(text) + (reader.finish() if _came_to_its_end(one) else [])
                        if thought is not None:
                            thought.add(one.token_ids, text)
                        for part in parts:
                            for told in self._items.add(part):
                                yield told
                        if one.finish_reason is not None:
                            for told in self._items.close(_status(one)):
                                yield told
                            yield self._last(output, one, tokens, 0 if thought is None else thought.total)
            except Exception as error:
                if not begun:
                    raise
                self.error = error
                yield "response.failed", {"response": self.failed(error)}

    def failed(self, error: Exception) -> dict[str, Any]:
        """Return the response when something went wrong."""
        told = described(error)
        self._caller.log["error"] = told.code
        return {**self.state("failed"), "error": _error(told)}

    def _logprobs(self, one: CompletionOutput) -> list[dict[str, Any]]:
        if one.logprobs is None or not self._body.tells_logprobs:
            return []
        return chat_logprobs(one.token_ids, one.logprobs, self._body.top_logprobs or 0)["content"]

    def _last(self, output: RequestOutput, one: CompletionOutput, tokens: int, thought: int) -> Event:
        ended = self._ended(output, one, tokens, thought)
        return f"response.{ended['status']}", {"response": ended}

    def _ended(self, output: RequestOutput, one: CompletionOutput, tokens: int, thought: int) -> dict[str, Any]:
        """Return the response at its end, which took so many tokens, those of its thought among them."""
        whole = one.finish_reason == "stop"
        why = "max_output_tokens" if one.finish_reason == "length" else "aborted"
        prompt = len(output.prompt_token_ids)
        return {
            **self.state(_status(one)),
            "incomplete_details": None if whole else {"reason": why},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": prompt + tokens,
            },
        }

    def state(self, status: str) -> dict[str, Any]:
        """Return the response as it is now."""
        return {
            **self._head,
            "status": status,
            "output": list(self._items.all),
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }


def _came_to_its_end(one: CompletionOutput) -> bool:
    return one.finish_reason not in (None, "abort")


def _sure(one: CompletionOutput) -> str:
    """Return the new text. Half a character at the end of one that was cut off is left out: a restarted server goes on
    with it, and it may become a whole one."""
    return one.text.rstrip("\ufffd") if one.finish_reason == "abort" else one.text


def _status(one: CompletionOutput) -> str:
    return "completed" if one.finish_reason == "stop" else "incomplete"


def _error(error: ApiError) -> dict[str, Any]:
    return {"code": error.code or "server_error", "message": error.message}
