"""A message's fields as OpenAI has them, made of the parts that a reader finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jpaged.server.message.parts import CallArguments, CallStart, Content, Part, Reasoning

if TYPE_CHECKING:
    from jpaged.server.message.conversation import Turn


class MessageFields:
    """Collects one output's message, and says what each piece of text adds to it.

    Args:
        turn: makes the reader of its text.
        index: number of the choice.
        request_id: begins the ids of its tool calls, which are new for each call.
    """

    def __init__(self, turn: Turn, index: int, request_id: str) -> None:
        self._turn = turn
        self._reader = turn.reader()
        self._thought = turn.thought_tokens(self._reader)
        self._id = f"call_{request_id}_{index}"
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    @property
    def thought_tokens(self) -> int | None:
        """Return how many tokens its thought has so far; None where thoughts are not told apart."""
        return None if self._thought is None else self._thought.total

    def add(self, text: str, token_ids: Sequence[int], *, ended: bool) -> dict[str, Any]:
        """Take in more of the output; return the `delta` of a chunk, empty where nothing is settled."""
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
            if self._turn.tells_reasoning:
                self._reasoning.append(part.text)
                delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
        elif isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            call = {"id": f"{self._id}_{part.index}", "type": "function", "function": function}
            self._calls.append({**call, "function": {**function}})
            delta.setdefault("tool_calls", []).append({"index": part.index, **call})
        elif isinstance(part, CallArguments):
            self._calls[part.index]["function"]["arguments"] += part.text
            news = delta.setdefault("tool_calls", [])
            if news and news[-1]["index"] == part.index:
                news[-1]["function"]["arguments"] += part.text
            else:
                news.append({"index": part.index, "function": {"arguments": part.text}})

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
        """Return how the message ended: with calls, where it has some and nothing cut it off."""
        if self._calls and ending["finish_reason"] == "stop":
            return {**ending, "finish_reason": "tool_calls"}
        return ending
