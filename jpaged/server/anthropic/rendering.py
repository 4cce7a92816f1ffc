"""Renders a turn's events as the blocks of a message, streamed and whole."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from jpaged.server.cache_use import SECONDS
from jpaged.server.turn import Arguments, Begun, CallBegun, CallEnded, Ended, Event, Text, Thought

Made = tuple[str, dict[str, Any]]
"""An event's type in Anthropic's API, and its other fields."""


class MessageBlocks:
    """Collects the blocks of one message and makes the events of its stream. Each block ends before the next begins.

    Args:
        head: the message's fields that are known at its beginning.
        answer_id: prefix of the ids of its calls.
        max_tokens: the request's limit.
        omits_thoughts: whether blocks of thoughts lack their text.

    Attributes:
        message: the message so far; the open block lacks its text.
    """

    def __init__(self, head: dict[str, Any], answer_id: str, max_tokens: int, *, omits_thoughts: bool) -> None:
        self._id = answer_id
        self._max_tokens = max_tokens
        self._omits = omits_thoughts
        self._blocks: list[dict[str, Any]] = []
        self._open = False
        self._hash = hashlib.sha256()
        self._pieces: list[str] = []  # of the open block's text, thought or arguments
        self.message: dict[str, Any] = {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            **head,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def add(self, event: Event) -> Iterator[Made]:
        """Add an event of the answer; yield those that it becomes."""
        if isinstance(event, Begun):
            self.message["usage"] = _usage(event, 0)
            yield "message_start", {"message": {**self.message, "content": []}}
            yield "ping", {}
        elif isinstance(event, Text):
            yield from self._in("text", text="")
            self._pieces.append(event.text)
            yield self._delta("text_delta", text=event.text)
        elif isinstance(event, Thought):
            yield from self._in("thinking", thinking="", signature="")
            self._hash.update(event.text.encode("utf-8", "surrogatepass"))
            if not self._omits:
                self._pieces.append(event.text)
                yield self._delta("thinking_delta", thinking=event.text)
        elif isinstance(event, CallBegun):
            yield from self._close()
            yield from self._in("tool_use", id=f"toolu_{self._id}_{event.index}", name=event.name, input={})
        elif isinstance(event, Arguments):
            self._pieces.append(event.text)
            yield self._delta("input_json_delta", partial_json=event.text)
        elif isinstance(event, CallEnded):
            if not event.is_cut:
                self._blocks[-1]["input"] = json.loads("".join(self._pieces) or "{}", strict=False)
            yield from self._close()
        else:
            yield from self._end(event)

    def _in(self, kind: str, **fields: Any) -> Iterator[Made]:
        """Yield the events that begin a block, unless one of its type is open."""
        if self._open and self._blocks[-1]["type"] == kind:
            return
        yield from self._close()
        self._open, self._hash, self._pieces = True, hashlib.sha256(), []
        self._blocks.append({"type": kind, **fields})
        yield "content_block_start", {"index": len(self._blocks) - 1, "content_block": dict(self._blocks[-1])}

    def _delta(self, kind: str, **fields: Any) -> Made:
        return "content_block_delta", {"index": len(self._blocks) - 1, "delta": {"type": kind, **fields}}

    def _close(self) -> Iterator[Made]:
        """Yield the events that end the open block, if there is one."""
        if not self._open:
            return
        self._open, kind = False, self._blocks[-1]["type"]
        if kind != "tool_use":
            self._blocks[-1][kind] = "".join(self._pieces)
        if kind == "thinking":
            # Clients send a thought back with its signature; they refuse one without.
            signature = base64.b64encode(self._hash.digest()).decode()
            self._blocks[-1]["signature"] = signature
            yield self._delta("signature_delta", signature=signature)
        yield "content_block_stop", {"index": len(self._blocks) - 1}

    def _end(self, ended: Ended) -> Iterator[Made]:
        yield from self._close()
        stop = ended.stop if isinstance(ended.stop, str) and ended.reason == "stop" else None
        how: dict[str, Any] = {"stop_reason": self._reason(ended, stop), "stop_sequence": stop}
        if ended.failure is not None:
            how["stop_details"] = {"type": "refusal", "category": None, "explanation": ended.failure}
        usage = _usage(ended, ended.output_tokens)
        if ended.thought_tokens is not None:
            usage["output_tokens_details"] = {"thinking_tokens": ended.thought_tokens}
        self.message |= {**how, "usage": usage}
        yield "message_delta", {"delta": how, "usage": usage}
        yield "message_stop", {}

    def _reason(self, ended: Ended, stop: str | None) -> str:
        if ended.reason == "length":
            return "max_tokens" if ended.output_tokens >= self._max_tokens else "model_context_window_exceeded"
        if ended.failure is not None:
            return "refusal"  # a client that sends the message back would meet the same failure
        if ended.reason == "abort":
            return "pause_turn"  # the server ends; the client may send the message back to have it continued
        return "tool_use" if ended.reason == "calls" else "end_turn" if stop is None else "stop_sequence"


def _usage(event: Begun | Ended, output_tokens: int) -> dict[str, Any]:
    """Return the `usage` of a message: `input_tokens` are those that neither were cached nor stay for a marked time."""
    cache = event.cache
    created, more = sum(cache.written.values()), {}
    if created:
        by_life = {f"ephemeral_{name}_input_tokens": cache.written.get(time, 0) for name, time in SECONDS.items()}
        more = {"cache_creation": by_life}
    if cache.by_tier:
        more["cache_read_input_tokens_by_tier"] = dict(cache.by_tier)
    return {
        "input_tokens": event.prompt_tokens - event.cached_tokens - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": event.cached_tokens,
        **more,
        "output_tokens": output_tokens,
    }
