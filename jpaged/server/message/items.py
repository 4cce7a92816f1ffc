"""A response's output items as OpenAI has them, with the events that tell of them as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jpaged.server.message.parts import CallArguments, CallStart, Content, Part, Reasoning

Event = tuple[str, dict[str, Any]]
"""The type of an event, and what it holds beside that."""
_STEMS = {"message": "output_text", "reasoning": "reasoning_text"}


class Items:
    """Makes items of the parts of one output; each is closed before the next one begins.

    Args:
        response_id: begins the items' ids.
        tells_reasoning: whether thoughts are items.
    """

    def __init__(self, response_id: str, *, tells_reasoning: bool = True) -> None:
        self._id = response_id
        self._tells_reasoning = tells_reasoning
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._scores: list[dict[str, Any]] = []

    @property
    def all(self) -> list[dict[str, Any]]:
        """Return the items so far."""
        return self._items

    def scored(self, scores: list[dict[str, Any]]) -> None:
        """Take in log-probabilities of tokens; the message's text that is added next is theirs."""
        self._scores += scores

    def _take_scores(self) -> list[dict[str, Any]]:
        scores, self._scores = self._scores, []
        self._items[-1]["content"][0]["logprobs"] += scores
        return scores

    def add(self, part: Part) -> Iterator[Event]:
        """Take in a part; yield the events that tell of it."""
        if isinstance(part, Reasoning) and not self._tells_reasoning:
            return
        if isinstance(part, CallStart):
            yield from self._begin(
                "function_call", call_id=f"call_{self._id}_{part.index}", name=part.name, arguments=""
            )
        elif isinstance(part, CallArguments):
            self._items[-1]["arguments"] += part.text
            yield "response.function_call_arguments.delta", {**self._place(), "delta": part.text}
        else:
            kind = "message" if isinstance(part, Content) else "reasoning"
            if not self._open or self._items[-1]["type"] != kind:
                extra: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
                yield from self._begin(kind, **extra, content=[])
                self._items[-1]["content"].append(self._part(kind, ""))
                if kind == "message":
                    told = {**self._place(), "content_index": 0, "part": self._part(kind, "")}
                    yield "response.content_part.added", told
            self._items[-1]["content"][0]["text"] += part.text
            delta = {**self._place(), "content_index": 0, "delta": part.text}
            yield (
                f"response.{_STEMS[kind]}.delta",
                delta | ({"logprobs": self._take_scores()} if kind == "message" else {}),
            )

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Yield the events that end the item that is open, if one is.

        Args:
            status: "incomplete" where the output was cut off.
        """
        if not self._open:
            return
        item, place = self._items[-1], self._place()
        self._open = False
        if item["type"] == "function_call":
            told = {**place, "name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", told
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
        item["status"] = status
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self.close()
        number = len(self._items)
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
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
    """Return the parts of an item that go on changing, as they are now."""
    return {"content": list(item["content"])} if "content" in item else {}
