"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the turns that they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jpaged import RequestOutputKind, SamplingParams, StructuredOutputsParams
from jpaged.server import turn as turns
from jpaged.server.anthropic import field_classes
from jpaged.server.bodies import Body, FieldClasses, at_most, only_fields
from jpaged.server.cache_use import MOST_MARKS, CacheControl
from jpaged.server.errors import ApiError, ClientNames
from jpaged.server.messages.system_messages import joined

MOST_TEXTS = 1024
"""Limit on the texts of `stop_sequences`, each of which is looked for after every token."""
_ATTRIBUTION = "x-anthropic-billing-header:"
"""Beginning of the line that a client writes before its system prompt, with a value that changes from turn to turn."""
_FIELDS = {
    "text": ("text",),
    "image": ("source",),
    "document": ("source", "title", "context"),
    "search_result": ("content", "source", "title"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("name", "id", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""Fields of each type of block; the first one is required, but for a result's."""


class Source(Body):
    """The data of an image or a document: an image in base64, a URL of an image, or a plain text."""

    classes: ClassVar[FieldClasses] = field_classes.SOURCE

    type: Literal["base64", "url", "text", "content"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: str | list[Block] | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Source:
        name = {"base64": "data", "text": "data"}.get(self.type, self.type)
        if getattr(self, name) is None:
            raise ValueError(f"a source of type {self.type!r} needs the field {name}")
        return self


class Block(Body):
    """A block of a message's content.

    Attributes:
        signature: of a thought; ignored, as thoughts are not sealed.
    """

    classes: ClassVar[FieldClasses] = field_classes.BLOCK

    type: Literal["text", "image", "document", "search_result", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Block:
        first = _FIELDS[self.type][0]
        if getattr(self, first) is None:
            raise ValueError(f"a block of type {self.type!r} needs the field {first}")
        if self.type in ("image", "document") and not isinstance(self.source, Source):
            raise ValueError(f"the source of a block of type {self.type!r} is an object")
        return self

    def parts(self, where: str, images: list[str]) -> list[dict[str, Any]]:
        """Return what a template is shown of a block of text, of an image, or of what has these inside.

        Args:
            images: receives the path of each image.

        Raises:
            ApiError: the block has another type, or fields of one.
        """
        only_fields(self, {"type", "cache_control", *_FIELDS[self.type]}, where, f"a block of type {self.type!r}")
        if self.type == "text":
            return [{"type": "text", "text": self.text}]
        if self.type == "image":
            assert isinstance(self.source, Source)
            images.append(f"{where}.source")
            url = self.source.url or f"data:{self.source.media_type or 'image/png'};base64,{self.source.data}"
            return [{"type": "image_url", "image_url": {"url": url}}]
        if self.type == "search_result":
            about = "\n".join(text for text in (self.title, self.source) if isinstance(text, str))
            return [{"type": "text", "text": about}, *_parts(self, where, images)]
        if self.type == "document" and isinstance(self.source, Source) and self.source.type in ("text", "content"):
            head = [{"type": "text", "text": text} for text in (self.title, self.context) if text]
            if self.source.type == "content":
                return head + _parts(self.source, f"{where}.source", images)
            return head + ([{"type": "text", "text": self.source.data}] if self.source.data else [])
        what = "only documents of plain text are read" if self.type == "document" else "it cannot stand here"
        raise ApiError(f"{where} has the type {self.type!r}: {what}", param=where, code="invalid_value")


Source.model_rebuild()


def _parts(owner: Block | Source, where: str, images: list[str]) -> list[dict[str, Any]]:
    """Return the parts of the content of a block or a source; see `Block.parts`."""
    content = owner.content
    if not isinstance(content, list):
        return [{"type": "text", "text": content}] if content else []
    places = [f"{where}.content.{owner.place('content', i)}" for i in range(len(content))]
    return [part for block, at in zip(content, places, strict=True) for part in block.parts(at, images)]


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as a template takes them: text alone as a text."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _text(block: Block, where: str) -> str:
    """Return the text of a block.

    Raises:
        ApiError: it has an image.
    """
    found = _content(block.parts(where, []))
    if not isinstance(found, str):
        raise ApiError(f"{where} has an image, and takes text only", param=where, code="invalid_value")
    return found


def _without_attribution(text: str) -> str:
    """Return a system prompt without the client's attribution line, with which no two prompts would begin alike."""
    return text.partition("\n")[2].lstrip("\n") if text.lstrip().startswith(_ATTRIBUTION) else text


def _system(content: str | list[Block] | None, where: str) -> str:
    if not isinstance(content, list):
        return _without_attribution(content or "")
    texts = [_without_attribution(_text(block, f"{where}.{i}")) for i, block in enumerate(content)]
    return "\n".join(text for text in texts if text)


class InputMessage(Body):
    """A message of a conversation."""

    classes: ClassVar[FieldClasses] = field_classes.MESSAGE

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def shown(self, where: str, images: list[str]) -> Iterator[dict[str, Any]]:
        """Yield the messages for the chat template; `images` receives the path of each image, in order."""
        blocks = self.content if isinstance(self.content, list) else [Block(type="text", text=self.content)]
        places = [f"{where}.content.{self.place('content', i)}" for i in range(len(blocks))]
        if self.role == "system":
            if text := _system(self.content, f"{where}.content"):
                yield {"role": "system", "content": text}
        elif self.role == "assistant":
            yield _said(blocks, places)
        else:
            yield from _asked(blocks, places, images)


def _said(blocks: list[Block], places: list[str]) -> dict[str, Any]:
    """Return a message of the assistant."""
    texts: list[dict[str, Any]] = []
    images: list[str] = []
    thoughts, calls = [], []
    for block, where in zip(blocks, places, strict=True):
        if block.type == "thinking":
            thoughts += [block.thinking] if block.thinking else []
        elif block.type == "tool_use":
            if block.id is None:
                raise ApiError(f"{where} of type 'tool_use' needs id", param=f"{where}.id", code="invalid_value")
            function = {"name": block.name, "arguments": json.dumps(block.input or {})}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            texts += block.parts(where, images)
            if images:
                why = f"{where} is an image, which only a message of the role 'user' may have"
                raise ApiError(why, param=where, code="invalid_value")
    message: dict[str, Any] = {"role": "assistant", "content": _content(texts) if texts else None}
    if message["content"] is None and not calls:
        message["content"] = ""
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(blocks: list[Block], places: list[str], images: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a user's one: results of tools, then the rest.

    Templates show the text of a result. Its images follow in the message of the user.
    """
    parts: list[dict[str, Any]] = []
    for block, where in zip(blocks, places, strict=True):
        if block.type != "tool_result":
            parts += block.parts(where, images)
            continue
        found = _parts(block, where, images)
        text = "\n".join(part["text"] for part in found if part["type"] == "text")
        if block.is_error:
            text = text if text.lower().startswith("error") else f"Error: {text}".rstrip()
        parts += [part for part in found if part["type"] != "text"]
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    if parts or not any(block.type == "tool_result" for block in blocks):
        yield {"role": "user", "content": _content(parts)}


class Tool(Body):
    """A tool that the client runs."""

    classes: ClassVar[FieldClasses] = field_classes.TOOL

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Body):
    """Says which tools the answer may call: "any" forces a call, "tool" that of the one named."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a choice of type 'tool' needs the field name, and no other has it")
        return self


class Thinking(Body):
    """Whether the model thinks, and what is shown of it.

    Attributes:
        budget_tokens: most tokens of the thoughts.
        display: "omitted" leaves the text of thoughts out.
    """

    classes: ClassVar[FieldClasses] = field_classes.THINKING

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0)
    display: Literal["summarized", "omitted", "updates"] | None = None

    @model_validator(mode="after")
    def _thinks_within_its_budget(self) -> Thinking:
        if self.type == "disabled" and self.budget_tokens is not None:
            raise ValueError("budget_tokens has no meaning with the type 'disabled'")
        return self


class OutputFormat(Body):
    """The schema of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The shape of the answer's text, and the model's effort, for templates that have a variable for it."""

    classes: ClassVar[FieldClasses] = field_classes.OUTPUT_CONFIG

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    """The user, for the log."""

    user_id: str | None = Field(None, max_length=512)


class Conversation(Body):
    """A conversation of which the tokens are counted, or whose next message is asked for."""

    classes: ClassVar[FieldClasses] = field_classes.CONVERSATION

    messages: list[InputMessage] = Field(min_length=1)
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None

    @property
    def params(self) -> dict[str, Any]:
        """Return the fields of the engine's parameters."""
        return {}

    def turn(self, defaults: SamplingParams) -> turns.Turn:
        """Return what the request asks.

        Args:
            defaults: parameters of fields that the request lacks.

        Raises:
            ApiError: a field is wrong.
        """
        images: list[str] = []
        messages = self._shown(self.system, self.messages, images)
        names = ClientNames(type(self).model_fields, self._sent_as(), images)
        if all(message["role"] == "system" for message in messages):
            raise ApiError("messages has no message of the user", param="messages", code="invalid_value")
        thinking, choice = self.thinking, self.tool_choice
        last = messages[-1]
        try:
            params = replace(defaults, **self.params)
            form = self.output_format or (self.output_config and self.output_config.format)
            shape = StructuredOutputsParams(json=form.schema_) if form else None
        except (ValueError, TypeError) as error:
            raise names.refusal(error) from error
        return turns.Turn(
            messages=messages,
            params=params,
            names=names,
            tools=[
                turns.Tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in self.tools or ()
            ],
            choice=_choice(choice),
            shape=shape,
            controls={
                "thinks": None if thinking is None else thinking.type != "disabled",
                "thought_budget": None if thinking is None else thinking.budget_tokens,
                "reasoning_effort": None if self.output_config is None else self.output_config.effort,
            },
            continues_message=last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last,
            moves_system=True,
            marked=self._marked(messages),
            model=self.model,
        )

    @property
    def hides_thoughts(self) -> bool:
        """Tell whether the text of thoughts is left out."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def _shown(
        self, system: str | list[Block] | None, messages: Sequence[InputMessage], images: list[str]
    ) -> list[dict[str, Any]]:
        """Return messages for the chat template, neighbours of one role joined; `images` receives their paths."""
        found: list[dict[str, Any]] = []
        if text := _system(system, "system"):
            found.append({"role": "system", "content": text})
        for i, message in enumerate(messages):
            for shown in message.shown(f"messages.{i}", images):
                if found and found[-1]["role"] == shown["role"] != "tool":
                    found[-1] = _joined(found[-1], shown)
                else:
                    found.append(shown)
        return found

    def _marked(self, messages: list[dict[str, Any]]) -> list[turns.Marked]:
        """Return the beginnings of the conversation that the client marks.

        Raises:
            ApiError: there are too many.
        """
        found = []
        tools = [tool.cache_control.seconds for tool in self.tools or () if tool.cache_control is not None]
        lists = (self.system, *(message.content for message in self.messages))
        number = sum(1 for each in lists if isinstance(each, list) for _ in _controls(each))
        number += bool(tools) + (self.cache_control is not None)
        if number > MOST_MARKS:  # each is rendered
            why = f"{MOST_MARKS} blocks with cache_control are taken at most, and the request has {number}"
            raise ApiError(why, param="messages", code="invalid_value")
        if tools:  # templates show them with the system's messages, or after these
            found = [turns.Marked(self._shown(self.system, (), []), max(tools))]
        blocks = self.system if isinstance(self.system, list) else ()
        for k, control in _controls(blocks):
            found.append(turns.Marked(self._shown(list(blocks[: k + 1]), (), []), control.seconds))
        for i, message in enumerate(self.messages):
            blocks = message.content if isinstance(message.content, list) else ()
            for k, control in _controls(blocks):
                cut = message.model_copy(update={"content": list(blocks[: k + 1])})
                shown = self._shown(self.system, [*self.messages[:i], cut], [])
                found.append(turns.Marked(shown, control.seconds))
        if self.cache_control is not None:
            found.append(turns.Marked(messages, self.cache_control.seconds))
        return found

    def _sent_as(self) -> dict[str, str]:
        names = dict.fromkeys(("prompt", "prompt_token_ids", "content", "images", "videos"), "messages")
        names |= {"stop": "stop_sequences", "structured_outputs": "output_config.format"}
        names["thinking_token_budget"] = "thinking.budget_tokens"
        path = "output_format.schema" if self.output_format is not None else "output_config.format.schema"
        return names | {"json": path, "grammar": "tools" if self.tools else path}


def _controls(blocks: Iterable[Block]) -> Iterator[tuple[int, CacheControl]]:
    """Yield the marks of a content, by the numbers of the blocks; one within a tool's result is the result's."""
    for k, block in enumerate(blocks):
        inner = block.content if isinstance(block.content, list) else ()
        if control := block.cache_control or next((one.cache_control for one in inner if one.cache_control), None):
            yield k, control


def _choice(choice: ToolChoice | None) -> turns.ToolChoice:
    if choice is None:
        return turns.ToolChoice()
    if choice.type == "tool":
        return turns.ToolChoice("required", (str(choice.name),), parallel=False)
    mode: Literal["auto", "required", "none"] = "required" if choice.type == "any" else choice.type
    return turns.ToolChoice(mode, None, parallel=not choice.disable_parallel_tool_use)


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return two neighbouring messages of one role as one."""
    found = {**one, **other, "content": joined(one["content"], other["content"])}
    if "tool_calls" in one and "tool_calls" in other:
        found["tool_calls"] = one["tool_calls"] + other["tool_calls"]
    if "reasoning_content" in one and "reasoning_content" in other:
        found["reasoning_content"] = f"{one['reasoning_content']}\n{other['reasoning_content']}"
    return found


class CountRequest(Conversation):
    """A request for the number of a prompt's tokens."""


class MessagesRequest(Conversation):
    """A request for the next message of a conversation."""

    max_tokens: int
    stop_sequences: Annotated[list[str] | None, at_most(MOST_TEXTS)] = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def params(self) -> dict[str, Any]:
        """Return the fields of the engine's parameters."""
        same = ("temperature", "top_p", "top_k")
        given = {name: getattr(self, name) for name in same if getattr(self, name) is not None}
        if self.stop_sequences:
            given["stop"] = self.stop_sequences
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return {**given, "max_tokens": self.max_tokens, "output_kind": kind}
