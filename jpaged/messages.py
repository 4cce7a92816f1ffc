"""A conversation's messages, checked and in the form that the model's chat template takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": ..., "content": ...}, ...]``.

Content is text or ``[{"type": "text", "text": ...}, ...]``.
"""


def templated(messages: Messages, tokenizer: Any, *, add_generation_prompt: bool) -> str:
    """A conversation as text, through the tokenizer's chat template.

    Where the template takes no list of parts, the parts of a content are joined by newlines.

    Raises:
        ValueError: there is no chat template, or the messages are none or do not fit it.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("the model has no chat template")
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages={messages!r} must be a list of {{'role': ..., 'content': ...}}")
    if not messages:
        raise ValueError(f"messages={messages!r} has no message; at least 1 is needed")
    parts = [_check(message) for message in messages]
    if any(parts) and not _takes_parts(tokenizer):
        messages = [
            {**message, "content": "\n".join(texts)} if texts else message
            for message, texts in zip(messages, parts, strict=True)
        ]
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    try:
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # a template is a program of the model's
        raise ValueError(f"messages={messages!r} do not fit the model's chat template: {error}") from error


def _check(message: Any) -> list[str]:
    """The texts of a message whose content is a list of parts; none of others."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {message!r} must be {{'role': ..., 'content': ...}}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return []
    if not isinstance(content, Sequence) or not content:
        raise ValueError(f"content={content!r} must be text or a list of parts")
    return [_text(part) for part in content]


def _text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise ValueError(f"content has a part of type {kind!r}, {part!r}; only 'text' is taken")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"content has {part!r}, whose 'text' must be text")
    return part["text"]


def _takes_parts(tokenizer: Any) -> bool:
    """Whether the template makes the same of a text and of a list with that text as its part."""

    def rendered(content: Any) -> str:
        return tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)

    try:
        return rendered([{"type": "text", "text": "text"}]) == rendered("text")
    except Exception:  # a template is a program of the model's
        return False
