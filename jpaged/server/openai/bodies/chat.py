"""The body of `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator

from jpaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jpaged.json_schema import first_unfollowed
from jpaged.server import turn as turns
from jpaged.server.bodies import Body, FieldClasses, only_fields
from jpaged.server.cache_use import MOST_MARKS, CacheControl
from jpaged.server.errors import ApiError, ClientNames
from jpaged.server.openai.bodies import field_classes
from jpaged.server.openai.bodies.fields import SamplingFields


class ImageUrl(Body):
    """The place of an image: a ``data:`` URL, or a URL that the engine's `ImageSources` allow.

    Attributes:
        detail: "low" shrinks the picture first, the others do not.
    """

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoUrl(Body):
    """The place of a video: a ``data:`` URL, or a URL that the engine's `ImageSources` allow."""

    url: str


class ImageEmbeds(Body):
    """Features of images that the client has encoded, each field a ``.npy`` file in base64.

    Attributes:
        image_grid_thw: patches of each image in time, height and width, where the model needs them; also as numbers.
    """

    image_embeds: str
    image_grid_thw: str | list[int] | list[list[int]] | None = None


class ContentPart(Body):
    """A part of a message's content: text, an image, its features or a video (both vLLM's). Sound and files are
    refused, since no model takes them."""

    classes: ClassVar[FieldClasses] = field_classes.CONTENT_PART

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None
    video_url: VideoUrl | None = None
    image_embeds: ImageEmbeds | None = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None
    cache_control: CacheControl | None = None

    def as_template_takes_it(self, where: str) -> dict[str, Any]:
        """Return the part for the chat template.

        Raises:
            ApiError: the part is of another type, or lacks the field of its type, or has another's.
        """
        if self.type in ("text", "image_url", "video_url", "image_embeds"):
            only_fields(self, {"type", "cache_control", self.type}, where, f"a part of the type {self.type!r}")
        if self.type == "text" and self.text is not None:
            return {"type": "text", "text": self.text}
        if self.type == "image_url" and self.image_url is not None:
            return {"type": "image_url", "image_url": self.image_url.model_dump(exclude_none=True)}
        if self.type == "video_url" and self.video_url is not None:
            return {"type": "video_url", "video_url": {"url": self.video_url.url}}
        if self.type == "image_embeds" and self.image_embeds is not None:
            return {"type": "image_embeds", "image_embeds": self.image_embeds.model_dump(exclude_none=True)}
        kinds = "'text', 'image_url', 'video_url' and 'image_embeds' are taken"
        message = f"{where} has the type {self.type!r}; {kinds}, each with a field of its name"
        raise ApiError(message, param=where, code="invalid_value")


class CalledFunction(Body):
    """A function that the assistant called, with its arguments as JSON text."""

    name: str
    arguments: str = ""


class ToolCall(Body):
    """A call in an earlier message of the assistant. A call of a custom tool becomes one of a function."""

    classes: ClassVar[FieldClasses] = field_classes.TOOL_CALL

    @classmethod
    def _prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        custom = data.get("custom")
        if data.get("type") != "custom" or not isinstance(custom, dict) or custom.keys() - {"name", "input"}:
            return data
        function = {"name": custom.get("name"), "arguments": json.dumps({"input": custom.get("input", "")})}
        return {name: value for name, value in data.items() if name not in ("type", "custom")} | {"function": function}

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


_OF_ROLE = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}
"""Fields of a message that belong to one role."""


class Message(Body):
    """One message. The chat template formats its name and tool calls."""

    classes: ClassVar[FieldClasses] = field_classes.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    cache_control: CacheControl | None = None

    def as_template_takes_it(self, where: str) -> dict[str, Any]:
        """Return the message for the chat template.

        Raises:
            ApiError: a part is neither text nor an image, or a field belongs to another role.
        """
        for name, role in _OF_ROLE.items():
            if getattr(self, name) and self.role != role:
                message = f"{where}.{name} is for a message of the role {role!r}, not {self.role!r}"
                raise ApiError(message, param=f"{where}.{name}", code="invalid_value")
        if self.annotations or self.refusal:
            name = "annotations" if self.annotations else "refusal"
            raise ApiError(f"{where}.{name} is not supported: the model is shown text only", param=f"{where}.{name}")
        shown = self.model_dump(exclude_unset=True, exclude={"annotations", "refusal", "content", "cache_control"})
        if self.role == "developer":
            shown["role"] = "system"  # the name in templates
        if isinstance(self.content, list):
            shown["content"] = [
                part.as_template_takes_it(f"{where}.content.{i}") for i, part in enumerate(self.content)
            ]
        else:
            shown["content"] = self.content
        return shown


def media_paths(messages: Iterable[Message], *kinds: str) -> list[str]:
    """Return the paths of a conversation's parts of some kinds; without any, of its images."""
    kinds = kinds or ("image_url", "image_embeds")
    return [
        f"messages.{i}.content.{k}.{part.type}"
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for k, part in enumerate(message.content)
        if part.type in kinds
    ]


class Function(Body):
    """A function that the model may call.

    Attributes:
        strict: whether a schema with a keyword that cannot be followed is refused; otherwise, and where it is absent,
            such a keyword is left to the model. Everything else of a schema is followed in either case.
    """

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Body):
    """A tool that takes one text. The model calls a function of one string.

    Attributes:
        format: the form of the text; a regular expression is followed.
    """

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    format: dict[str, Any] | None = None

    def as_function(self) -> Function:
        """Return the function that the model is shown."""
        text: dict[str, Any] = {"type": "string"}
        grammar = self._grammar
        if grammar.get("syntax") == "regex" and isinstance(grammar.get("definition"), str):
            text["pattern"] = f"^(?:{grammar['definition']})$"
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
        about: dict[str, Any] = {} if self.description is None else {"description": self.description}
        return Function(name=self.name, **about, parameters=schema)

    @property
    def _grammar(self) -> dict[str, Any]:
        """Return the grammar of the text, which chats have one level deeper than responses."""
        form = self.format or {}
        grammar = form.get("grammar", form)
        return grammar if isinstance(grammar, dict) else {}

    @model_validator(mode="after")
    def _names_a_grammar_in_lark(self) -> CustomTool:
        if self._grammar.get("syntax") == "lark":
            self._unhonoured["format"] = field_classes.LARK_INPUT
        elif unfollowed := first_unfollowed({"pattern": self._grammar.get("definition")}):
            self._unhonoured["format"] = f"{unfollowed} cannot be followed"
        return self


class Tool(Body):
    """A tool: a function, or a custom tool, which takes one text."""

    classes: ClassVar[FieldClasses] = field_classes.TOOL

    type: Literal["function", "custom"]
    function: Function | None = None
    custom: CustomTool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Tool:
        if getattr(self, self.type) is None:
            raise ValueError(f"a tool of the type {self.type!r} needs the field {self.type}")
        other = "custom" if self.type == "function" else "function"
        if getattr(self, other) is not None:
            raise ValueError(f"{other} has no meaning in a tool of the type {self.type!r}")
        return self

    def as_function(self) -> Function:
        """Return the function that the model is shown."""
        if self.custom is not None:
            return self.custom.as_function()
        assert self.function is not None
        return self.function

    def in_turn(self) -> turns.Tool:
        """Return the tool of a turn."""
        function = self.as_function()
        takes_text = self.custom is not None
        return turns.Tool(function.name, function.description, function.parameters, function.strict, takes_text)


class NamedFunction(Body):
    """The function that the answer must call."""

    name: str


class NamedTool(Body):
    """The tool that the answer must call."""

    type: Literal["function", "custom"] = "function"
    function: NamedFunction

    @classmethod
    def _prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("type") != "custom" or "custom" not in data or "function" in data:
            return data
        return {"type": "custom", "function": data["custom"]}


class AllowedTool(Body):
    """A tool that the answer may call, by its name, which chats have in an object of the tool's type."""

    @classmethod
    def _prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        kind = data.get("type")
        named = data.get(kind) if isinstance(kind, str) else None
        return {"type": kind, **named} if isinstance(named, dict) and data.keys() == {"type", kind} else data

    type: Literal["function", "custom"] = "function"
    name: str


class AllowedTools(Body):
    """The tools that the answer may call, and whether it must call one. The prompt has all tools."""

    @classmethod
    def _prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the form of responses, which is the inside of that of chats."""
        inner = data.get("allowed_tools")
        if data.keys() == {"type", "allowed_tools"} and isinstance(inner, dict):
            return {"type": data["type"], **inner}
        return data

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1)


def _kind_of_choice(choice: Any) -> str:
    if not isinstance(choice, dict | Body):
        return "Word"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "Allowed" if kind == "allowed_tools" else "Named"


SENT_AS_MESSAGES = dict.fromkeys(("prompt", "prompt_token_ids", "content", "images", "videos"), "messages")
"""Names of what the messages become, and of what they have, in the engine's errors, each for the client's name."""
BY_CHOICE = Discriminator(_kind_of_choice)
"""Tells the forms of `tool_choice` apart, so that an error is about the form that was meant."""


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation.

    Attributes:
        top_logprobs: number of most likely tokens at each position, -1 = the whole vocabulary (vLLM's); needs
            `logprobs`.
        parallel_tool_calls: whether an answer may call several tools.
        reasoning_effort, verbosity: passed to the chat template; not honoured if it does not use them.
        service_tier: "auto" or "default", which are the same.
        add_generation_prompt, continue_final_message, chat_template_kwargs: see `jpaged.LLM.chat` (vLLM's names).
        include_reasoning: whether the answer has the model's reasoning (vLLM's).
    """

    classes: ClassVar[FieldClasses] = field_classes.CHAT

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=-1)
    max_completion_tokens: int | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    safety_identifier: str | None = Field(None, max_length=256)
    service_tier: Literal["auto", "default"] | None = None
    tools: list[Tool] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("Word")]
            | Annotated[AllowedTools, Tag("Allowed")]
            | Annotated[NamedTool, Tag("Named")],
            BY_CHOICE,
        ]
        | None
    ) = None
    verbosity: str | None = None
    # vLLM's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the conversation for the chat template."""
        return [message.as_template_takes_it(f"messages.{i}") for i, message in enumerate(self.messages)]

    _sent_as: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _images: list[str] | None = PrivateAttr(None)

    @property
    def sent_as(self) -> Mapping[str, str]:
        """Return the client's names, or paths, of the parameters that have others in the engine."""
        names = {**super().sent_as, **SENT_AS_MESSAGES, "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.tools:
            names["grammar"] = "tools"
        return {**self._sent_as, **{name: self._sent_as.get(sent, sent) for name, sent in names.items()}}

    def name_fields(self, sent_as: Mapping[str, str], images: Sequence[str]) -> None:
        """Set the client's names, or paths, of fields and images that have others in its request, for errors."""
        self._sent_as, self._images = dict(sent_as), list(images)

    @property
    def names(self) -> ClientNames:
        """Return the names that the client sent."""
        images = media_paths(self.messages) if self._images is None else self._images
        return ClientNames(type(self).model_fields, self.sent_as, images, media_paths(self.messages, "video_url"))

    def refusal(self, error: Exception) -> ApiError:
        """Return the error for a value that jpaged refuses, by the names that the client sent."""
        return self.names.refusal(error)

    def turn(self, defaults: SamplingParams, max_model_len: int, **more: Any) -> turns.Turn:
        """Return what the request asks.

        Args:
            defaults: parameters of fields that the request lacks.
            max_model_len: tokens of a beam if the request sets no limit.
            more: further fields of the turn.

        Raises:
            ApiError: a field is wrong, or needs another.
        """
        both = self.continue_final_message and self.add_generation_prompt
        if both and "add_generation_prompt" in self.model_fields_set:
            message = "continue_final_message=true continues a message, and add_generation_prompt=true begins one"
            raise ApiError(message, param="continue_final_message", code="invalid_value")
        tools = [tool.in_turn() for tool in self.tools or ()]
        choice, messages = self._choice(), self.template_messages()
        return turns.Turn(
            messages=messages,
            params=self._params(defaults, max_model_len),
            names=self.names,
            tools=tools,
            choice=choice,
            shape=self._shape(with_tools=bool(tools) and choice.mode != "none"),
            covers_thought=self.structured_outputs is not None,
            shows_thoughts=self.include_reasoning,
            controls={"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity},
            variables=self.chat_template_kwargs or {},
            mm_processor_kwargs=self.mm_processor_kwargs,
            begins_message=self.add_generation_prompt,
            continues_message=self.continue_final_message,
            last_tokens=self.truncate_prompt_tokens,
            hides_marks=self.skip_special_tokens,
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt,
            marked=self._marked(messages),
            **more,
        )

    def _marked(self, messages: Sequence[Mapping[str, Any]]) -> list[turns.Marked]:
        """Return the beginnings of the conversation that the client marks; of many the longest."""
        places: list[tuple[int, int | None, float]] = []  # message, its last part if it is cut, seconds
        tools = [tool.cache_control.seconds for tool in self.tools or () if tool.cache_control is not None]
        if tools:  # templates show them with the system's messages, or after these
            system = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
            places = [(system - 1, None, max(tools))]
        for i, message in enumerate(self.messages):
            for k, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.cache_control is not None:
                    places.append((i, k, part.cache_control.seconds))
            if message.cache_control is not None:
                places.append((i, None, message.cache_control.seconds))
        found = []
        for i, last, seconds in places[-MOST_MARKS:]:
            cut = [] if last is None else [{**messages[i], "content": messages[i]["content"][: last + 1]}]
            found.append(turns.Marked([*messages[: i + (last is None)], *cut], seconds))
        return found

    def _choice(self) -> turns.ToolChoice:
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, NamedTool):
            return turns.ToolChoice("required", (choice.function.name,), parallel=False)
        if isinstance(choice, AllowedTools):
            return turns.ToolChoice(choice.mode, tuple(tool.name for tool in choice.tools), parallel)
        return turns.ToolChoice(choice or "auto", None, parallel)

    def _params(self, defaults: SamplingParams, max_model_len: int) -> SamplingParams | BeamSearchParams:
        most = self.most_tokens
        if self.use_beam_search:
            if self.tools:
                message = "tools have no meaning with use_beam_search=true"
                raise ApiError(message, param="tools", code="invalid_value")
            return self.beam_params(most_tokens=max_model_len if most is None else most)
        scores = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return self.sampling_params(defaults, max_tokens=most, structured_outputs=None, **scores)

    def _shape(self, *, with_tools: bool) -> StructuredOutputsParams | None:
        """Return the shape of the answer's text.

        Raises:
            ApiError: the shape is invalid.
        """
        try:
            return self.shape()
        except (ValueError, TypeError) as error:
            if not with_tools:
                raise self.refusal(error) from error
            name = "response_format" if self.structured_outputs is None else "structured_outputs"
            raise ApiError(str(error), param=name, code="invalid_value") from error

    @property
    def most_tokens(self) -> int | None:
        """Return the limit on the answer's tokens; None: as many as fit.

        Raises:
            ApiError: its two names have different values.
        """
        new, old = self.max_completion_tokens, self.max_tokens
        if new is not None and old is not None and new != old:
            raise ApiError(
                f"max_completion_tokens={new} and max_tokens={old} are one limit: give one of them",
                param="max_tokens",
                code="invalid_value",
            )
        return old if new is None else new
