"""The bodies of `/tokenize` and `/detokenize`, which are vLLM's."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jpaged.server.protocol.body import Body
from jpaged.server.protocol.chat import Message, Tool


class TokenizeRequest(Body):
    """Asks for the tokens of a text or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(Body):
    """Asks for the text of tokens."""

    model: str | None = None
    tokens: list[int]
