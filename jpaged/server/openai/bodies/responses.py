"""The body of `/v1/responses`, its conversion to a chat request, and the ids of responses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PrivateAttr, Tag, ValidationError, model_validator

from jpaged.server.bodies import Body, FieldClasses, at_most, only_fields
from jpaged.server.errors import ApiError, invalid
from jpaged.server.openai.bodies import field_classes
from jpaged.server.openai.bodies.chat import BY_CHOICE, AllowedTools, ChatRequest
from jpaged.server.openai.bodies.fields import MOST_TEXTS

_PART_FIELDS = {"input_image": ("image_url", "detail"), "output_text": ("text", "annotations", "logprobs")}
"""Fields of the parts that have more than text; the first one is required."""


class InputPart(Body):
    """A part of an item's content: text or, in a message of the user and in a function's output, an image.

    Attributes:
        image_url: a ``data:`` URL, or a URL that the engine's `ImageSources` allow.
        detail: as of an `ImageUrl`.
        logprobs: log-probabilities from an earlier response; ignored.
    """

    classes: ClassVar[FieldClasses] = field_classes.INPUT_PART

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "input_image"]
    text: str = ""
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
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

    @property
    def is_image(self) -> bool:
        """Tell whether the part is an image."""
        return self.type == "input_image"

    def in_chat(self) -> dict[str, Any]:
        """Return the part of a chat's message."""
        if self.is_image:
            return {"type": "image_url", "image_url": {"url": self.image_url, "detail": self.detail}}
        return {"type": "text", "text": self.text}


_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
"""Fields of each type of item, besides those that every item of a response has."""


class InputItem(Body):
    """One item of a conversation: a message, a call, a call's result, or a thought. Output items of a response are
    accepted unchanged.

    Attributes:
        id, status: from an earlier response; ignored.
    """

    classes: ClassVar[FieldClasses] = field_classes.INPUT_ITEM

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

    @classmethod
    def _prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return an item as the model is shown it: a call of a custom tool or of a namespace as one of a function."""
        if data.get("type") == "custom_tool_call" and isinstance(data.get("input"), str):
            arguments = json.dumps({"input": data["input"]})
            data = {key: value for key, value in data.items() if key != "input"}
            data |= {"type": "function_call", "arguments": arguments}
        elif data.get("type") == "custom_tool_call_output":
            data = {**data, "type": "function_call_output"}
        elif data.get("type") == "reasoning" and data.get("content"):
            data = {key: value for key, value in data.items() if key != "summary"}  # the model is shown one of them
        if data.get("type") == "function_call" and data.get("arguments") is None:
            data = {**data, "arguments": "{}"}
        space, name = data.get("namespace"), data.get("name")
        if isinstance(space, str) and isinstance(name, str) and data.get("type") == "function_call":
            data = {key: value for key, value in data.items() if key != "namespace"} | {"name": f"{space}.{name}"}
        return data

    def check(self, where: str) -> None:
        """Check that an item has the fields of its type and no others.

        Raises:
            ApiError: it does not.
        """
        only_fields(self, {"type", "id", "status", *_FIELDS[self.type]}, where, f"an item of type {self.type!r}")
        if self.type == "reasoning":
            return
        for name in _FIELDS[self.type]:
            if getattr(self, name) is None:
                message = f"{where} of type {self.type!r} needs {name}"
                raise ApiError(message, param=f"{where}.{name}", code="invalid_value")

    def thought(self, where: str) -> str:
        """Return the text of a reasoning item: its content or, without that, its summary."""
        if self.content:
            return _text(self.content, f"{where}.content")
        return _text(self.summary, f"{where}.summary")

    def message(self, where: str) -> dict[str, Any]:
        """Return the item as a message of a chat.

        Raises:
            ApiError: an image is not in a message of the user.
        """
        if self.type == "function_call":
            function = {"name": self.name, "arguments": self.arguments}
            return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}
        if self.type == "function_call_output":
            output = self.output
            texts = [part for part in output if not part.is_image] if isinstance(output, list) else output
            return {"role": "tool", "tool_call_id": self.call_id, "content": _text(texts, f"{where}.output")}
        content = self.content
        if self.role != "user" or not isinstance(content, list) or not any(part.is_image for part in content):
            return {"role": self.role, "content": _text(content, f"{where}.content")}
        return {"role": self.role, "content": [part.in_chat() for part in content]}

    def images_of_output(self) -> list[dict[str, Any]]:
        """Return the images of a function's output, as parts of a chat's message."""
        output = self.output if self.type == "function_call_output" and isinstance(self.output, list) else ()
        return [part.in_chat() for part in output if part.is_image]


def _text(content: str | list[InputPart] | None, where: str) -> str:
    """Return a content's text.

    Raises:
        ApiError: the content has an image.
    """
    if not isinstance(content, list):
        return content or ""
    for i, part in enumerate(content):
        if part.is_image:
            message = f"{where}.{i} is an image, which only a message of the user and a function's output may have"
            raise ApiError(message, param=f"{where}.{i}", code="invalid_value")
    return "\n".join(part.text for part in content)


def messages_of(items: Iterable[InputItem], place: Callable[[int], int]) -> list[dict[str, Any]]:
    """Return the messages of a conversation. `place` returns where an item stands in the request, for errors.

    A thought becomes part of the message after it. It is a message of its own if the response was cut off before that.
    Templates show the text of a function's output: its images follow the outputs, in a message of the user.

    Raises:
        ApiError: an item lacks a field of its type, has another type's, or has an image outside the user's messages.
    """
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    images: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input.{place(i)}"
        item.check(where)
        if item.type == "reasoning":
            thoughts += [thought] if (thought := item.thought(where)) else []
            continue
        message = item.message(where)
        if message["role"] != "tool" and images:
            if message["role"] == "user":
                message["content"] = [*images, *_parts(message["content"])]
            else:
                messages.append({"role": "user", "content": images})
            images = []
        images += item.images_of_output()
        last = messages[-1] if messages else {}
        if message["role"] != "assistant":
            messages += _thought_alone(thoughts)
        elif thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        elif "tool_calls" in message and last.get("role") == "assistant":
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        messages.append(message)
        thoughts = []
    after = [{"role": "user", "content": images}] if images else []
    return [*messages, *after, *_thought_alone(thoughts)]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _thought_alone(thoughts: list[str]) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)}] if thoughts else []


class ResponseTool(Body):
    """A function or a custom tool that the model may call, or a namespace of several.

    Attributes:
        format: the form of a custom tool's input.
        tools: the tools of a namespace, each of which the model sees as ``namespace.tool``.
    """

    classes: ClassVar[FieldClasses] = field_classes.RESPONSE_TOOL

    type: Literal["function", "custom", "namespace"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list[ResponseTool] | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ResponseTool:
        fields = {"function": {"parameters", "strict"}, "custom": {"format"}, "namespace": {"tools"}}[self.type]
        for name in sorted(self.model_fields_set - {"type", "name", "description", *fields}):
            raise ValueError(f"{name} has no meaning in a tool of type {self.type!r}")
        if self.type == "namespace" and not self.tools:
            raise ValueError("a tool of type 'namespace' needs the field tools")
        if any(tool.type == "namespace" for tool in self.tools or ()):
            raise ValueError("a namespace cannot hold another one")
        return self

    def called(self) -> list[tuple[str, CalledTool]]:
        """Return the tools that the model may call, each with the name that it is shown."""
        if self.tools is None:
            return [(self.name, CalledTool(self, None))]
        return [(f"{self.name}.{tool.name}", CalledTool(tool, self.name)) for tool in self.tools]

    def echo(self) -> dict[str, Any]:
        """Return the tool as a response repeats it."""
        if self.type == "function":
            return self.model_dump(exclude={"format", "tools"})
        return self.model_dump(exclude_unset=True)


class CalledTool(NamedTuple):
    """A tool that the model may call, and the namespace that holds it."""

    tool: ResponseTool
    namespace: str | None

    def as_chat(self, name: str) -> dict[str, Any]:
        """Return the tool of a chat request."""
        kind = self.tool.type
        return {"type": kind, kind: {**self.tool.model_dump(exclude_unset=True, exclude={"type"}), "name": name}}


class ResponseToolChoice(Body):
    """The tool that the answer must call."""

    type: Literal["function", "custom"]
    name: str


class TextFormat(Body):
    """The shape of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> TextFormat:
        if self.type != "json_schema":
            only_fields(self, {"type"}, "text.format", f"a format of the type {self.type!r}")
        return self


class TextOptions(Body):
    """Options of the answer's text; see `ChatRequest` for `verbosity`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Body):
    """Options of the model's thoughts."""

    classes: ClassVar[FieldClasses] = field_classes.REASONING

    effort: str | None = None


class ResponseStreamOptions(Body):
    """Options of a stream of events, none of which is applied."""

    classes: ClassVar[FieldClasses] = field_classes.STREAM_OPTIONS


_NAMES_IN_CHAT = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Paths of this request's fields by those of the chat request that it becomes."""


class ResponsesRequest(Body):
    """A request for a response.

    Attributes:
        store: whether the response can be read by its id until newer ones replace it; true by default.
        background: whether it continues without its client.
        previous_response_id: a stored response whose conversation this one continues, without its instructions.
        include: "message.output_text.logprobs" for the log-probabilities of tokens, each with `top_logprobs` others.
        truncation: "auto" drops the oldest items of an input that does not fit.
        top_k, min_p, seed, stop, repetition_penalty, min_tokens, ignore_eos, thinking_token_budget, cache_salt,
            priority: see `SamplingFields` (vLLM's).
        mm_processor_kwargs: settings of the processor of images (vLLM's).
    """

    classes: ClassVar[FieldClasses] = field_classes.RESPONSES

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    background: bool = False
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("Word")]
            | Annotated[AllowedTools, Tag("Allowed")]
            | Annotated[ResponseToolChoice, Tag("Named")],
            BY_CHOICE,
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    user: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=256)
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, at_most(MOST_TEXTS)] = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1)
    mm_processor_kwargs: dict[str, Any] | None = None
    _num_earlier: int = PrivateAttr(0)

    @property
    def is_stored(self) -> bool:
        """Tell whether the response is stored."""
        return self.store is not False

    @property
    def includes_logprobs(self) -> bool:
        """Tell whether the answer has log-probabilities."""
        return bool(self.include)

    @property
    def items(self) -> list[InputItem]:
        """Return the input as items, also if it is a text."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def after(self, history: list[InputItem]) -> ResponsesRequest:
        """Return a request with the items of an earlier conversation before its own."""
        items = self.items
        made = self.model_copy(update={"input": [*history, *items]})
        own = [self.place("input", i) for i in range(len(items))]
        made._places = self._places | {"input": [0] * len(history) + own}
        made._num_earlier = len(history)
        return made

    @property
    def called(self) -> dict[str, CalledTool]:
        """Return the tools that the model may call, by the names that it is shown."""
        return dict(self._calls())

    def _calls(self) -> list[tuple[str, CalledTool]]:
        return [pair for tool in self.tools or () for pair in tool.called()]

    def as_chat(self) -> ChatRequest:
        """Return the chat request of the same conversation. It is always streamed.

        Raises:
            ApiError: an item lacks a field of its type, or a field needs another.
        """
        if self.background and not self.is_stored:
            raise ApiError("background=true needs store=true", param="background", code="invalid_value")
        if self.top_logprobs is not None and not self.includes_logprobs:
            message = f"top_logprobs={self.top_logprobs} needs include=['message.output_text.logprobs']"
            raise ApiError(message, param="top_logprobs", code="invalid_value")
        same = {"model", "temperature", "top_p", "user", "safety_identifier", "top_k", "min_p", "seed"}
        same |= {"repetition_penalty", "stop", "min_tokens", "ignore_eos", "priority", "cache_salt", "service_tier"}
        same |= {"mm_processor_kwargs", "thinking_token_budget"}
        given: dict[str, Any] = {name: getattr(self, name) for name in same & self.model_fields_set}
        given["messages"] = self._messages()
        if not given["messages"]:
            raise ApiError("input has no message; at least 1 is needed", param="input", code="invalid_value")
        given["stream"] = True
        if self.includes_logprobs:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        given["max_completion_tokens"] = self.max_output_tokens
        given["reasoning_effort"] = None if self.reasoning is None else self.reasoning.effort
        given["verbosity"] = None if self.text is None else self.text.verbosity
        given["response_format"] = self._format()
        if self.tools:
            given["tools"] = [tool.as_chat(name) for name, tool in self._calls()]
            given["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        given["tool_choice"] = choice
        if isinstance(choice, ResponseToolChoice):
            given["tool_choice"] = {"function": {"name": choice.name}}
        elif isinstance(choice, AllowedTools):
            given["tool_choice"] = choice.model_dump()
        try:
            chat = ChatRequest.model_validate(given)
        except ValidationError as error:
            raise invalid([{**each, "loc": self._place_in_request(each["loc"])} for each in error.errors()]) from error
        chat.name_fields(_NAMES_IN_CHAT, self._image_paths())
        return chat

    def _image_paths(self) -> list[str]:
        """Return the paths of the input's images; one of an earlier response is named by that response's field."""
        return [
            "previous_response_id" if i < self._num_earlier else f"input.{self.place('input', i)}.{name}.{k}.image_url"
            for i, item in enumerate(self.items)
            for name in ("content", "output")
            if isinstance(parts := getattr(item, name), list)
            for k, part in enumerate(parts)
            if part.is_image
        ]

    def _place_in_request(self, loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
        """Return the place in this request of an error in the chat request."""
        if loc[0] == "messages":
            return ("input",)
        if loc[0] != "tools" or len(loc) < 2 or not isinstance(loc[1], int):
            return loc
        places: list[tuple[int | str, ...]] = []
        for i, tool in enumerate(self.tools or ()):
            place = ("tools", self.place("tools", i))
            places += [place] if tool.tools is None else [(*place, "tools", k) for k in range(len(tool.tools))]
        return (*places[loc[1]], *loc[3:])  # without "function" or "custom", which a tool of responses lacks

    def _format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.schema_ is None:
            raise ApiError("text.format.schema is needed with json_schema", param="text.format.schema")
        return {"type": "json_schema", "json_schema": {"name": form.name or "", "schema": form.schema_}}

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return [*messages, *messages_of(self.input, partial(self.place, "input"))]


def new_response_id(request_id: str, replica: str = "") -> str:
    """Return a new id of a response, with the name of the replica that stores it, if there are several."""
    return f"resp_{replica}-{request_id}" if replica else f"resp_{request_id}"


def keeper_of(response_id: str) -> str | None:
    """Return the replica that stores a response; None if its id names none.

    >>> keeper_of(new_response_id("5f3", "x7k2m9qa"))
    'x7k2m9qa'
    """
    named = re.match(r"resp_([A-Za-z0-9]+)-", response_id)
    return named.group(1) if named else None
