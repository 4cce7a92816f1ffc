"""Finds by trial the form of an earlier message's thoughts in which a chat template shows them.

Most templates read a field of the message; `template_rendering` gives each of its names. Others have a part of the
content for thoughts, or show only what stands in the content itself, between the family's marks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jpaged.answers.format import Region
from jpaged.answers.rows import ANSWER_FORMATS
from jpaged.text.template_rendering import THOUGHTS

Message = Mapping[str, Any]
Form = Callable[[Message, str], dict[str, Any]]
"""Returns a message with a thought in one form, given the message without it."""

_THOUGHT = "a tried thought"
_SAID = {"role": "assistant", "content": "a text"}
_CALL = {"id": "tried0001", "type": "function", "function": {"name": "tried", "arguments": {}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "tried0001", "name": "tried", "content": "a result"}


def thought_form(template: str, render: Callable[..., str | None]) -> Form | None:
    """Return the form of thoughts that a template shows; None: as fields of their messages, or not at all.

    Args:
        render: renders messages; None if the template does not take them.
    """
    if _shows(render, _in_fields):
        return None
    regions = {form.thought for form in ANSWER_FORMATS.values() if form.thought is not None}
    known = [region for region in regions if _is_in(template, region)]
    forms: list[Form] = [_in_a_part, *(_between(region) for region in sorted(known, key=lambda one: one.begin))]
    return next((form for form in forms if _shows(render, form)), None) if known or "thinking" in template else None


def with_thoughts_in(messages: Sequence[Message], form: Form | None) -> list[dict[str, Any]]:
    """Return a conversation whose thoughts have the form that its template shows."""
    found = []
    for message in messages:
        rest, thought = without_thought(message)
        found.append(dict(message) if form is None or thought is None else form(rest, thought))
    return found


def without_thought(message: Message) -> tuple[dict[str, Any], str | None]:
    """Return a message without its thought, and the thought; None: it has none, or one that is no text."""
    thought = next((message[name] for name in THOUGHTS if message.get(name)), None)
    rest = {name: value for name, value in message.items() if name not in THOUGHTS}
    return rest, thought if isinstance(thought, str) else None


def _shows(render: Callable[..., str | None], form: Form) -> bool:
    said, called = form(_SAID, _THOUGHT), form(_CALLED, _THOUGHT)
    user = {"role": "user", "content": "hello"}
    each = (render(user, said) or "", render(user, called, _RESULT) or "")
    return any(_THOUGHT in text and "'thinking'" not in text and '"thinking"' not in text for text in each)


def _is_in(template: str, region: Region) -> bool:
    return all(any(mark.strip() in template for mark in marks) for marks in (region.begin, region.end))


def _in_fields(message: Message, thought: str) -> dict[str, Any]:
    return {**message, "reasoning_content": thought}


def _in_a_part(message: Message, thought: str) -> dict[str, Any]:
    content = message.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": thought}, *parts]}


def _between(region: Region) -> Form:
    def form(message: Message, thought: str) -> dict[str, Any]:
        begin, end = region.begin[0].strip(), region.end[0].strip()
        said = "\n".join([begin, thought.strip("\n"), end, "", ""])
        content = message.get("content") or ""
        if isinstance(content, str):
            return {**message, "content": said + content}
        return {**message, "content": [{"type": "text", "text": said}, *content]}

    return form
