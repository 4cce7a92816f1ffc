"""The turn that a chat request asks for: how its prompt is made, what shape the answer has, how its text is read."""

from __future__ import annotations

from typing import Any

from jpaged import StructuredOutputsParams
from jpaged.server.errors import ApiError
from jpaged.server.message.parts import PlainReader, Reader
from jpaged.server.protocol.chat import ChatRequest
from jpaged.server.settings import ServerSettings


class Turn:
    """What the fields of a chat request mean for its prompt and its answer.

    Raises:
        ApiError: they ask for what the server or the model cannot do.
    """

    def __init__(self, body: ChatRequest, settings: ServerSettings) -> None:
        self._body = body
        self._settings = settings
        self.tells_reasoning = body.include_reasoning
        if body.tools and settings.tool_parser is None:
            raise ApiError(
                "tools need a server that was started with --tool-parser", param="tools", code="unsupported_parameter"
            )

    def template_options(self) -> dict[str, Any]:
        """Return the arguments of `AsyncLLM.chat_prompt` beside the messages."""
        body = self._body
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        return {
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
            "chat_template_kwargs": variables or None,
        }

    def shape(self) -> StructuredOutputsParams | None:
        """Return the shape that tools give the answer; None = that which the request's other fields ask for."""
        return None

    def starts_behind(self, prompt: str) -> None:
        """Take note of the prompt that the answer follows."""

    def reader(self) -> Reader:
        """Return what reads one output."""
        return PlainReader()
