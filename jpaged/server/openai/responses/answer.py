"""Makes the events of one response: its state, and its output items as they grow."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from jpaged.server.bodies import unhonoured
from jpaged.server.cache_use import details
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError, described
from jpaged.server.messages.custom_tools import CustomInput
from jpaged.server.openai.bodies.responses import CalledTool, ResponsesRequest
from jpaged.server.openai.logprobs import chat_logprobs
from jpaged.server.serving import Serving
from jpaged.server.turn import Arguments, CallBegun, CallEnded, Ended, Event, Piece, Text, Thought


class Answer:
    """One response to one request.

    Args:
        response_id: its id.
        created: time of the request, in seconds since 1970; None: now.

    Attributes:
        error: the failure after the first event, if any.

    Raises:
        ApiError: a field is refused.
    """

    def __init__(
        self, serving: Serving, body: ResponsesRequest, caller: Caller, response_id: str, created: int | None = None
    ) -> None:
        self._serving = serving
        self._caller = caller
        self._body = body
        chat, engine = body.as_chat(), serving.engine
        more = {"drops_oldest": body.truncation == "auto", "resumable": True}
        self._form = serving.form_of(chat.turn(engine.get_default_sampling_params(), engine.max_model_len, **more))
        if body.includes_logprobs and self._form.splits:
            message = "include has logprobs, which a text that is split into tool calls or thoughts does not have"
            raise ApiError(message, param="include", code="unsupported_parameter")
        self._items = Items(caller.answer_id, body.called)
        self._id = response_id
        self._created = int(time.time()) if created is None else created
        for name in ("user", "safety_identifier"):
            if getattr(body, name) is not None:
                caller.log[name] = getattr(body, name)
        places = {"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}
        named = unhonoured(body) | unhonoured(chat)
        named |= {places[name]: reason for name, reason in self._form.unhonoured.items()}
        self._head = self._echo(body) | serving.not_honoured(named)
        self.error: Exception | None = None

    def _echo(self, body: ResponsesRequest) -> dict[str, Any]:
        """Return the fields of the request that a response repeats."""
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
            "tools": [tool.echo() for tool in body.tools or ()],
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "truncation": body.truncation or "disabled",
            "store": body.is_stored,
            "background": body.background,
            "previous_response_id": body.previous_response_id,
            "top_logprobs": body.top_logprobs or 0,
            "service_tier": "default",
            "metadata": body.metadata or {},
        } | ({"tool_choice": "auto"} if choice is None else {})

    async def events(self) -> AsyncGenerator[Made, None]:
        """Yield the events of the response.

        Raises:
            ApiError: the request is refused before the first event; a later failure becomes an event.
        """
        steps = await self._serving.answer(self._form, self._caller)
        begun = False
        async with aclosing(steps):
            try:
                async for step in steps:
                    if not begun:
                        begun = True
                        yield "response.created", {"response": self.state("in_progress")}
                        yield "response.in_progress", {"response": self.state("in_progress")}
                    for piece in step.pieces:
                        self._items.scored(self._logprobs(piece))
                        for event in piece.events:
                            for made in self._items.add(event):
                                yield made
                        if (ended := piece.ended) is not None:
                            for made in self._items.close(
                                "completed" if _status(ended) == "completed" else "incomplete"
                            ):
                                yield made
                            yield f"response.{_status(ended)}", {"response": self._ended(ended)}
            except Exception as error:
                if not begun:
                    raise
                self.error = error
                yield "response.failed", {"response": self.failed(error)}

    def failed(self, error: Exception) -> dict[str, Any]:
        """Return the response after a failure."""
        answer = described(error)
        self._caller.log["error"] = answer.code
        return {**self.state("failed"), "error": _error(answer)}

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.logprobs is None or not self._body.includes_logprobs:
            return []
        tokenizer = self._serving.engine.tokenizer
        return chat_logprobs(piece.token_ids, piece.logprobs, self._body.top_logprobs or 0, tokenizer)["content"]

    def _ended(self, ended: Ended) -> dict[str, Any]:
        """Return the ended response."""
        why = "max_output_tokens" if ended.reason == "length" else "aborted"
        return {
            **self.state(_status(ended)),
            "error": None if ended.failure is None else {"code": "server_error", "message": ended.failure},
            "incomplete_details": {"reason": why} if _status(ended) == "incomplete" else None,
            "usage": {
                "input_tokens": ended.prompt_tokens,
                "input_tokens_details": {
                    **details(ended.cached_tokens, [ended.cache.by_tier]),
                    "cache_write_tokens": sum(ended.cache.written.values()),
                },
                "output_tokens": ended.output_tokens,
                "output_tokens_details": {"reasoning_tokens": ended.thought_tokens or 0},
                "total_tokens": ended.prompt_tokens + ended.output_tokens,
            },
        }

    def state(self, status: str) -> dict[str, Any]:
        """Return the response in its current state; an open item of one that is cancelled or has failed is cut off."""
        if status in ("cancelled", "failed"):
            self._items.cut_off()
        return {
            **self._head,
            "status": status,
            "output": list(self._items.all),
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }


def _status(ended: Ended) -> str:
    if ended.failure is not None:
        return "failed"
    return "completed" if ended.reason in ("stop", "calls") else "incomplete"


def _error(error: ApiError) -> dict[str, Any]:
    return {"code": error.code or "server_error", "message": error.message}


Made = tuple[str, dict[str, Any]]
"""An event's type in OpenAI's API, and its other fields."""
_STEMS = {"message": "output_text", "reasoning": "reasoning_text"}


class Items:
    """Output items in OpenAI's form, made from the events of one answer. Each is closed before the next begins.

    Args:
        response_id: prefix of the items' ids.
        tools: the tools that may be called, by the names that the model is shown.
    """

    def __init__(self, response_id: str, tools: Mapping[str, CalledTool] | None = None) -> None:
        self._id = response_id
        self._tools = tools or {}
        self._input = CustomInput()
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._pieces: list[str] = []  # of the last item's text that it lacks yet
        self._is_cut = False  # whether the output ended within a call
        self._scores: list[dict[str, Any]] = []

    @property
    def all(self) -> list[dict[str, Any]]:
        """Return the items so far."""
        self._join()
        return self._items

    def _join(self) -> None:
        """Give the last item its text so far: adding every delta to it would copy it each time."""
        if not self._pieces:
            return
        item = self._items[-1]
        fields = {"function_call": "arguments", "custom_tool_call": "input"}
        holder, name = (item, fields[item["type"]]) if item["type"] in fields else (item["content"][0], "text")
        holder[name] += "".join(self._pieces)
        self._pieces.clear()

    def cut_off(self) -> None:
        """Note that no more comes of the open item, if there is one."""
        if self._open:
            self._items[-1]["status"] = "incomplete"

    def scored(self, scores: list[dict[str, Any]]) -> None:
        """Add log-probabilities of tokens. They belong to the text of the message that is added next."""
        self._scores += scores

    def _take_scores(self) -> list[dict[str, Any]]:
        scores, self._scores = self._scores, []
        self._items[-1]["content"][0]["logprobs"] += scores
        return scores

    def add(self, event: Event) -> Iterator[Made]:
        """Add an event of the answer; yield those that it becomes."""
        if isinstance(event, CallEnded):
            self._is_cut = event.is_cut
        elif isinstance(event, CallBegun):
            yield from self._call(event)
        elif isinstance(event, Arguments) and self._items[-1]["type"] == "custom_tool_call":
            new = self._input.push(event.text)
            self._pieces.append(new)
            if new:
                yield "response.custom_tool_call_input.delta", {**self._place(), "delta": new}
        elif isinstance(event, Arguments):
            self._pieces.append(event.text)
            yield "response.function_call_arguments.delta", {**self._place(), "delta": event.text}
        elif isinstance(event, Text | Thought):
            yield from self._more(event)

    def _more(self, event: Text | Thought) -> Iterator[Made]:
        """Yield the events of more text."""
        kind = "message" if isinstance(event, Text) else "reasoning"
        if not self._open or self._items[-1]["type"] != kind:
            extra: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, **extra, content=[])
            self._items[-1]["content"].append(self._part(kind, ""))
            if kind == "message":
                fields = {**self._place(), "content_index": 0, "part": self._part(kind, "")}
                yield "response.content_part.added", fields
        self._pieces.append(event.text)
        delta = {**self._place(), "content_index": 0, "delta": event.text}
        yield (
            f"response.{_STEMS[kind]}.delta",
            delta | ({"logprobs": self._take_scores()} if kind == "message" else {}),
        )

    def close(self, status: str = "completed") -> Iterator[Made]:
        """Yield the events that end the open item, if there is one.

        Args:
            status: "incomplete" if the output was cut off.
        """
        if not self._open:
            return
        self._join()
        item, place = self._items[-1], self._place()
        self._open = False
        if item["type"] == "function_call":
            fields = {**place, "name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", fields
        elif item["type"] == "custom_tool_call":
            yield "response.custom_tool_call_input.done", {**place, "input": item["input"]}
        else:
            if item["type"] == "message":
                self._take_scores()
            text = item["content"][0]["text"]
            done = {**place, "content_index": 0, "text": text}
            yield (
                f"response.{_STEMS[item['type']]}.done",
                done | ({"logprobs": item["content"][0]["logprobs"]} if item["type"] == "message" else {}),
            )
            if item["type"] == "message":
                part = {**place, "content_index": 0, "part": dict(item["content"][0])}
                yield "response.content_part.done", part
        item["status"] = "incomplete" if self._is_cut and item["type"].endswith("_call") else status
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _call(self, event: CallBegun) -> Iterator[Made]:
        """Yield the events that begin a call."""
        called = self._tools.get(event.name)
        name = event.name if called is None else called.tool.name
        fields: dict[str, Any] = {"call_id": f"call_{self._id}_{event.index}", "name": name}
        if called is not None and called.namespace is not None:
            fields["namespace"] = called.namespace
        if called is not None and called.tool.type == "custom":
            self._input = CustomInput()
            yield from self._begin("custom_tool_call", **fields, input="")
        else:
            yield from self._begin("function_call", **fields, arguments="")

    def _begin(self, kind: str, **fields: Any) -> Iterator[Made]:
        yield from self.close()
        number = len(self._items)
        prefix = {"message": "msg", "function_call": "fc", "custom_tool_call": "ctc", "reasoning": "rs"}[kind]
        item = {"id": f"{prefix}_{self._id}_{number}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._open = True
        yield "response.output_item.added", {"output_index": number, "item": {**item, **_copied(item)}}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    @staticmethod
    def _part(kind: str, text: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the item's content, which changes later."""
    return {"content": list(item["content"])} if "content" in item else {}
