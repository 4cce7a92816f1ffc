"""The body of `/v1/responses`, and the chat request that it amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from jpaged.server.errors import ApiError, invalid
from jpaged.server.protocol.body import Body, only_fields
from jpaged.server.protocol.chat import ChatRequest
from jpaged.server.protocol.response_items import InputItem, messages_of

_NOT_KEPT = "use previous_response_id, or send the conversation as input"


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Body):
    """The function that has to be called."""

    type: Literal["function"]
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
    """How the text is shaped."""

    refused: ClassVar[Mapping[str, str]] = {"verbosity": "the model has no such control"}

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """How much the model thinks."""

    refused: ClassVar[Mapping[str, str]] = {
        "summary": "thoughts are told as they are",
        "generate_summary": "thoughts are told as they are",
    }

    effort: str | None = None


class ResponsesRequest(Body):
    """Asks for a response.

    Attributes:
        store: whether it can be read again by its id, until others need its place; OpenAI's default is that it can.
        background: whether it goes on without its client.
        previous_response_id: a stored response that this one goes on from; its instructions are not taken over.
        include: "message.output_text.logprobs" for the log-probabilities of tokens, with `top_logprobs` others beside
            each.
        top_k, min_p, seed, stop, repetition_penalty, min_tokens, ignore_eos, cache_salt, priority: see
            `SamplingFields` (vLLM's).
    """

    refused: ClassVar[Mapping[str, str]] = {
        "conversation": _NOT_KEPT,
        "prompt": "there are no stored prompts",
        "context_management": "what does not fit is refused",
        "max_tool_calls": "parallel_tool_calls=false allows one",
        "prompt_cache_key": "prefixes are cached by their tokens; cache_salt keeps them apart",
        "prompt_cache_retention": "cached prefixes stay until others need their memory",
        "stream_options": "chunks are as long as their text, and the last one has the usage",
        "moderation": "the server moderates nothing",
    }

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool = False
    background: bool = False
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool = True
    user: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=256)
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1)

    @property
    def is_stored(self) -> bool:
        """Tell whether it can be read again."""
        return self.store is not False

    @property
    def tells_logprobs(self) -> bool:
        """Tell whether the answer has log-probabilities."""
        return bool(self.include)

    @property
    def items(self) -> list[InputItem]:
        """Return the input as items, also where it is a text."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def as_chat(self) -> ChatRequest:
        """Return the chat request of the same conversation, which is streamed whether the response is or not.

        Raises:
            ApiError: an item lacks what its type needs, or a field needs another.
        """
        if self.background and not self.is_stored:
            raise ApiError("background=true needs store=true", param="background", code="invalid_value")
        if self.top_logprobs is not None and not self.tells_logprobs:
            message = "top_logprobs needs include=['message.output_text.logprobs']"
            raise ApiError(message, param="top_logprobs", code="invalid_value")
        same = {"model", "temperature", "top_p", "user", "safety_identifier", "top_k", "min_p", "seed"}
        same |= {"repetition_penalty", "stop", "min_tokens", "ignore_eos", "priority", "cache_salt", "service_tier"}
        given: dict[str, Any] = {name: getattr(self, name) for name in same & self.model_fields_set}
        given["messages"] = self._messages()
        given["stream"] = True
        if self.tells_logprobs:
            given |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        given["max_completion_tokens"] = self.max_output_tokens
        given["reasoning_effort"] = None if self.reasoning is None else self.reasoning.effort
        given["response_format"] = self._format()
        if self.tools:
            given["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude_unset=True, exclude={"type"})}
                for tool in self.tools
            ]
            given["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        given["tool_choice"] = {"function": {"name": choice.name}} if isinstance(choice, ResponseToolChoice) else choice
        try:
            return ChatRequest.model_validate(given)
        except ValidationError as error:
            raise invalid(error.errors()) from error

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
        return [*messages, *messages_of(self.input)]
