"""The items of a conversation that `/v1/responses` is given, and the messages of a chat that they amount to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from jpaged.server.errors import ApiError
from jpaged.server.protocol.body import Body, only_fields

_PART_FIELDS = {"input_image": ("image_url", "detail"), "output_text": ("text", "annotations", "logprobs")}
"""Fields of the parts that have more than text, the one that is needed first."""


class InputPart(Body):
    """A part of an item's content: text, or in a message of the user an image.

    Attributes:
        image_url: a ``data:`` URL, or what the engine's `ImageSources` allow.
        detail: how closely the model looks is up to the model.
        logprobs: what a response said of its text; the conversation is the same without.
    """

    refused: ClassVar[Mapping[str, str]] = {"file_id": "there are no files: give image_url"}

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "input_image"]
    text: str = ""
    image_url: str | None = None
    detail: Literal["auto"] | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> InputPart:
        fields = _PART_FIELDS.get(self.type, ("text",))
        if fields[0] not in self.model_fields_set:
            raise ValueError(f"a part of type {self.type!r} needs the field {fields[0]}")
        if extra := sorted(self.model_fields_set - {"type", *fields}):
            raise ValueError(f"{extra[0]} has no meaning in a part of type {self.type!r}")
        if self.annotations:
            raise ValueError("annotations is not supported: the model is shown text only")
        return self


_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
"""Fields of each type of item, beside those that any item of a response may have."""


class InputItem(Body):
    """One item of a conversation: a message, a call, a call's result, or a thought; a response's output is taken as
    it came.

    Attributes:
        id, status: what a response said of the item; the conversation is the same without.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None

    def check(self, where: str) -> None:
        """Refuse an item that lacks what its type needs, or has what only others have.

        Raises:
            ApiError: it does.
        """
        only_fields(self, {"type", "id", "status", *_FIELDS[self.type]}, where, f"an item of type {self.type!r}")
        if self.type == "reasoning":
            if self.content and self.summary:
                message = f"{where}.summary has no meaning beside content: give one of them"
                raise ApiError(message, param=f"{where}.summary", code="invalid_value")
            return
        for name in _FIELDS[self.type]:
            if getattr(self, name) is None:
                message = f"{where} of type {self.type!r} needs {name}"
                raise ApiError(message, param=f"{where}.{name}", code="invalid_value")

    def thought(self, where: str) -> str:
        """Return the text of a reasoning item."""
        if self.content:
            return _text(self.content, f"{where}.content")
        return _text(self.summary, f"{where}.summary")

    def message(self, where: str) -> dict[str, Any]:
        """Return the item as a message of a chat.

        Raises:
            ApiError: there is an image in what is not a message of the user.
        """
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output, f"{where}.output")}
        content = self.content
        if self.role != "user" or not isinstance(content, list) or all(part.type != "input_image" for part in content):
            return {"role": self.role, "content": _text(content, f"{where}.content")}
        parts = [
            {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
            if part.type == "input_image"
            else {"type": "text", "text": part.text}
            for part in content
        ]
        return {"role": self.role, "content": parts}


def _text(content: str | list[InputPart] | None, where: str) -> str:
    """Return a content's text.

    Raises:
        ApiError: it has an image.
    """
    if not isinstance(content, list):
        return content or ""
    for i, part in enumerate(content):
        if part.type == "input_image":
            message = f"{where}.{i} is an image, which only a message of the role 'user' may have"
            raise ApiError(message, param=f"{where}.{i}", code="invalid_value")
    return "\n".join(part.text for part in content)


def messages_of(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Return the messages of a conversation. A thought stands in the message that follows from it, or alone where a
    response was cut off before it said anything.

    Raises:
        ApiError: an item lacks what its type needs, has what others have, or has an image that nobody looks at.
    """
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, item in enumerate(items):
        item.check(f"input.{i}")
        if item.type == "reasoning":
            thoughts += [thought] if (thought := item.thought(f"input.{i}")) else []
            continue
        message, last = item.message(f"input.{i}"), messages[-1] if messages else {}
        if message["role"] != "assistant":
            messages += _thought_alone(thoughts)
        elif thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        elif "tool_calls" in message and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        messages.append(message)
        thoughts = []
    return [*messages, *_thought_alone(thoughts)]


def _thought_alone(thoughts: list[str]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)}] if thoughts else []
