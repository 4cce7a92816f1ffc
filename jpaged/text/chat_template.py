"""Checks a conversation's messages and renders them by the model's chat template."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

from jpaged.images import LowDetail
from jpaged.text.template_forms import TemplateForms, forms_of, has_calls, with_calls_in
from jpaged.text.template_rendering import THOUGHTS
from jpaged.text.thought_forms import with_thoughts_in
from jpaged.validation import boolean, one_of

Messages = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": ..., "content": ...}, ...]``.

Content is text or a list of parts, ``{"type": "text", "text": ...}``, images, ``{"type": "image_url", "image_url":
{"url": ...}}``, ``{"type": "image_pil", "image_pil": ...}`` or ``{"type": "image", "image": ...}``, their
features, ``{"type": "image_embeds", "image_embeds": {...}}``, and videos,
``{"type": "video_url", "video_url": {"url": ...}}`` or ``{"type": "video", "video": ...}``.
"""
DETAILS = ("auto", "low", "high", "original")
"""Details of an image's URL, as OpenAI's; all but "low" are the picture as the checkpoint prepares it."""
_MODALITIES = {
    "image_embeds": "image",
    "image_url": "image",
    "image_pil": "image",
    "image": "image",
    "video_url": "video",
    "video": "video",
}
"""What the parts of a content that are no text are, by their types."""
_TAKEN = "only 'text' is taken, and images and videos by models that see"
Marks = Mapping[str, str]
"""What a text has in the place of an item, by its modality, where the template does not write it itself."""
ContentFormat = Literal["auto", "string", "openai"]
_FORMATS = ("auto", "string", "openai")


class ChatArguments(TypedDict, total=False):
    """The fields of `ChatOptions`, as arguments of a call."""

    chat_template: str | None
    chat_template_content_format: ContentFormat
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options that render a conversation as a prompt; the names and meanings are vLLM's.

    Attributes:
        chat_template: a Jinja template in place of the model's own.
        chat_template_content_format: "string" joins the parts of a content by newlines, "openai" passes the
            parts to the template, with a plain text as a single part; "auto" chooses by the template.
        add_generation_prompt: whether the prompt ends where the assistant's turn begins.
        continue_final_message: whether the prompt ends where the last message's content ends, with which the model then
            goes on.
        tools: functions that the model may call, as JSON schemas or in OpenAI's form.
        chat_template_kwargs: further variables of the template, say ``{"enable_thinking": False}``.

    Raises:
        ValueError: a value is none of these, and the message names it; or add_generation_prompt and
            continue_final_message are both True.
    """

    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message"):
            boolean(name, getattr(self, name))
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt=True begins a new message and continue_final_message=True goes on with the "
                "last one: give add_generation_prompt=False with it"
            )
        one_of("chat_template_content_format", self.chat_template_content_format, _FORMATS)
        if self.chat_template is not None and not (isinstance(self.chat_template, str) and self.chat_template):
            raise ValueError(f"chat_template={self.chat_template!r} must be the text of a template")
        if self.tools is not None and not _are_mappings(self.tools):
            raise ValueError(f"tools={self.tools!r} must be a list of mappings")
        variables = self.chat_template_kwargs
        if variables is not None and not isinstance(variables, Mapping):
            raise ValueError(f"chat_template_kwargs={variables!r} must be a mapping")
        own = {"tokenize", "messages", "conversation", *(field.name for field in fields(self))}
        if taken := own.intersection(variables or ()):
            raise ValueError(
                f"chat_template_kwargs has {sorted(taken)}, which are no variables but arguments of chat()"
            )


def media_in(messages: Any) -> dict[str, list[Any]]:
    """Return the images and videos of a conversation by their modality, in order; checks only as much as is needed to
    find them.

    Raises:
        ValueError: a part that says that it is an image has none.
    """
    found: dict[str, list[Any]] = {}
    for message in messages if isinstance(messages, Sequence) and not isinstance(messages, str) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
            if modality := _modality(part):
                kind = part["type"]
                item, detail = part.get(kind), None
                if kind.endswith("_url") and isinstance(item, Mapping):
                    detail = item.get("detail") if modality == "image" else None
                    item = item.get("url")
                    if detail not in (None, *DETAILS):
                        raise ValueError(f"content has {kind} with detail={detail!r}; it is {', '.join(DETAILS)}")
                if item is None:
                    raise ValueError(f"content has a part of type {kind!r} without {modality}, {part!r}; {_TAKEN}")
                found.setdefault(modality, []).append(LowDetail(item) if detail == "low" else item)
    return found


def templated(messages: Messages, tokenizer: Any, options: ChatOptions, marks: Marks | None = None) -> str:
    """Return a conversation as text, through the chat template.

    Where the template takes no list of parts, the parts of a content are joined by newlines; where it takes nothing
    else, as those of some vision-language models, a text becomes a list of one part. Tool calls of earlier messages
    take the form in which the template shows them and their arguments.

    Args:
        marks: what the text has in the place of an image or a video where the template does not write it itself.

    Raises:
        ValueError: there is no chat template, it has no place for the tools, or the messages are none or do not fit it.
    """
    template = _template(tokenizer, options)
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages={messages!r} must be a list of {{'role': ..., 'content': ...}}")
    if not messages:
        raise ValueError(f"messages={messages!r} has no message; at least 1 is needed")
    forms = forms_of(tokenizer, template)
    marks = marks or {}
    for message in messages:
        _check(message, marks)

    def rendered(messages: Messages, options: ChatOptions) -> str:
        return tokenizer.apply_chat_template(
            _as_the_template_takes_them(messages, tokenizer, forms, options.chat_template_content_format, marks),
            tokenize=False,
            chat_template=template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=None if options.tools is None else list(options.tools),
            **(options.chat_template_kwargs or {}),
        )

    try:
        return rendered(messages, options)
    except Exception as error:  # a template is a program of the model's
        from jinja2.exceptions import TemplateSyntaxError  # the tokenizer imports Jinja at the first rendering

        if isinstance(error, TemplateSyntaxError):
            raise ValueError(f"the chat template is damaged, in line {error.lineno}: {error}") from error
        if str(error).startswith("continue_final_message=True"):
            raise ValueError(str(error)) from error
        what = _unfitting(messages, replace(options, continue_final_message=False), str(error), rendered)
        raise ValueError(f"{what} not fit the chat template: {error}") from error


def _as_the_template_takes_them(
    messages: Messages, tokenizer: Any, forms: TemplateForms, said: ContentFormat, marks: Marks
) -> Messages:
    form = forms.content if said == "auto" else said
    if form == "string":
        parts = [_check(message, marks) for message in messages]
        messages = [
            {**message, "content": "\n".join(texts)} if texts else message
            for message, texts in zip(messages, parts, strict=True)
        ]
    else:
        if form == "openai":
            messages = [_in_parts(message) for message in messages]
        if marks:
            messages = [_with_plain_items(message) for message in messages]
    if any(message.get(name) for message in messages for name in THOUGHTS):
        messages = with_thoughts_in(messages, forms.thoughts(tokenizer))
    if any(has_calls(message) for message in messages):
        messages = with_calls_in(messages, forms.calls(tokenizer))
        if form == "openai":  # calls may have become a text
            messages = [_in_parts(message) for message in messages]
    return [_with_a_text(message) for message in messages]


def _unfitting(
    messages: Messages, options: ChatOptions, error: str, rendered: Callable[[Messages, ChatOptions], str]
) -> str:
    """Return what a template refuses, by leaving parts of the conversation out until it does not say `error`."""

    def fails(messages: Messages, options: ChatOptions = options) -> bool:
        try:
            rendered(messages, options)
        except Exception as other:
            return str(other) == error
        return False

    if options.chat_template_kwargs and not fails(messages, replace(options, chat_template_kwargs=None)):
        return "chat_template_kwargs do"
    if options.tools and not fails(messages, replace(options, tools=None)):
        return "tools do"
    last = bisect_left(range(1, len(messages) + 1), True, key=lambda count: fails(messages[:count]))
    if last == len(messages) or not fails(messages[: last + 1]):
        return f"the {len(messages)} messages do"
    message = messages[last]
    place = f"messages[{last}], of the role {message['role']!r}, does"
    for name in (key for key in message if key != "role"):
        others = {key: value for key, value in message.items() if key != name} | (
            {"content": ""} if name == "content" else {}
        )
        if not fails([*messages[:last], others]):
            return f"{name} of {place}"
    return place


def _template(tokenizer: Any, options: ChatOptions) -> str:
    """Return the template in `options`, or the model's own, which may have another one for tools."""
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, which a chat template needs")
    if options.chat_template is None and not tokenizer.chat_template:
        raise ValueError("the model has no chat template: give chat_template=")
    tools = None if options.tools is None else list(options.tools)
    template = options.chat_template or tokenizer.get_chat_template(None, tools)
    if tools and "tools" not in template:
        raise ValueError(
            f"tools={tools!r}: the chat template has no place for them; give one that has, with chat_template= "
            "(jpaged serve: --chat-template FILE)"
        )
    return template


def _modality(part: Any) -> str | None:
    """Return whether a part is an image or a video; None = neither."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return _MODALITIES.get(kind) if isinstance(kind, str) else None


def _with_plain_items(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with ``{"type": "image"}`` for each image, which is how templates know them; a video too."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    return {**message, "content": [{"type": kind} if (kind := _modality(part)) else part for part in content]}


def _check(message: Any, marks: Marks) -> list[str]:
    """Return the texts of a message whose content is a list of parts, with the mark of each item; none of other
    messages."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {message!r} must be {{'role': ..., 'content': ...}}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return []
    if isinstance(content, list) and not content and has_calls(message):
        return []
    if not isinstance(content, Sequence) or not content:
        raise ValueError(f"content={content!r} must be text or a list of parts")
    return [marks.get(_modality(part) or "") or _text(part) for part in content]


def _text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise ValueError(f"content has a part of type {kind!r}, {part!r}; {_TAKEN}")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"content has {part!r}, whose 'text' must be text")
    return part["text"]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with a text as a list of one part."""
    content = message.get("content")
    if not content or not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_a_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message; an assistant's without content and calls, such as a lone thought, has an empty text.

    An empty list of calls is left out: some templates look only at whether there is a list, and drop the text then.
    """
    shown = {name: value for name, value in message.items() if name != "tool_calls" or value}
    empty = message["role"] == "assistant" and message.get("content") is None and not has_calls(message)
    return {**shown, "content": ""} if empty else shown


def _are_mappings(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, Mapping) for value in values)
