"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from jpaged.server.errors import ApiError
from jpaged.server.protocol.fields import Body, SamplingFields, only_fields


class ImageUrl(Body):
    """The place of an image: a ``data:`` URL, or a URL that the engine's `ImageSources` allow.

    Attributes:
        detail: "auto" only, since the resolution depends on the model.
    """

    url: str
    detail: Literal["auto"] | None = None


class ContentPart(Body):
    """A part of a message's content: text or an image. Sound and files are refused, since no model takes them."""

    type: str
    text: str | None = None
    image_url: ImageUrl | None = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None

    def as_template_takes_it(self, where: str) -> dict[str, Any]:
        """Return the part for the chat template.

        Raises:
            ApiError: the part is neither text nor an image, or lacks the field of its type, or has another.
        """
        if self.type in ("text", "image_url"):
            only_fields(self, {"type", self.type}, where, f"a part of the type {self.type!r}")
        if self.type == "text" and self.text is not None:
            return {"type": "text", "text": self.text}
        if self.type == "image_url" and self.image_url is not None:
            return {"type": "image_url", "image_url": {"url": self.image_url.url}}
        message = f"{where} has the type {self.type!r}; 'text' and 'image_url' are taken, each with a field of its name"
        raise ApiError(message, param=where, code="invalid_value")


class CalledFunction(Body):
    """A function that the assistant called, with its arguments as JSON text."""

    name: str
    arguments: str = ""


class ToolCall(Body):
    """A call in an earlier message of the assistant."""

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

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "messages are text",
        "function_call": "use tool_calls",
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

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
        shown = self.model_dump(exclude_unset=True, exclude={"annotations", "refusal", "content"})
        if self.role == "developer":
            shown["role"] = "system"  # the name in templates
        if isinstance(self.content, list):
            shown["content"] = [
                part.as_template_takes_it(f"{where}.content.{i}") for i, part in enumerate(self.content)
            ]
        else:
            shown["content"] = self.content
        return shown


class Function(Body):
    """A function that the model may call.

    Attributes:
        strict: no effect, since arguments always follow the schema.
    """

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which is a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function that the answer must call."""

    name: str


class NamedTool(Body):
    """The tool that the answer must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation.

    Attributes:
        top_logprobs: number of most likely tokens at each position; needs `logprobs`.
        parallel_tool_calls: whether an answer may call several tools.
        reasoning_effort: passed to the chat template, which must use it.
        service_tier: "auto" or "default", which are the same.
        add_generation_prompt, continue_final_message, chat_template_kwargs: see `jpaged.LLM.chat` (vLLM's names).
        include_reasoning: whether the answer has the model's reasoning (vLLM's).
    """

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "answers are text",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "metadata": "nothing is stored",
        "prediction": "speculation is a setting of the server",
        "prompt_cache_key": "prefixes are cached by their tokens; cache_salt keeps them apart",
        "prompt_cache_retention": "cached prefixes stay until others need their memory",
        "verbosity": "the model has no such control",
        "web_search_options": "the server cannot search",
        "moderation": "the server does not moderate",
    }

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    safety_identifier: str | None = Field(None, max_length=256)
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    # vLLM's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the conversation for the chat template."""
        return [message.as_template_takes_it(f"messages.{i}") for i, message in enumerate(self.messages)]

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
