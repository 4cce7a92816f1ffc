"""Starts the turn that a chat request asks for; `/v1/chat/completions` and `/v1/responses` tell its outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from jpaged import BeamSearchParams, RequestOutput, SamplingParams
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError, refused
from jpaged.server.message.conversation import Turn
from jpaged.server.protocol.chat import ChatRequest
from jpaged.server.serving import Serving


async def start_turn(
    serving: Serving, body: ChatRequest, turn: Turn, caller: Caller
) -> AsyncGenerator[RequestOutput, None]:
    """Return the outputs of the conversation's next turn, as they come; the engine begins when the first is awaited.

    Raises:
        ApiError: the conversation does not fit the chat template, or a field is refused.
    """
    try:
        messages, options = body.template_messages(), turn.template_options()
        made = await asyncio.to_thread(serving.engine.chat_prompt, messages, **options)
    except ValueError as error:
        raise refused(error, type(body).model_fields) from error
    turn.starts_behind(made["prompt"])
    prompt: Mapping[str, Any] = made if body.cache_salt is None else {**made, "cache_salt": body.cache_salt}
    return serving.generate(prompt, _params(serving, body, turn), caller, model=body.model, priority=body.priority)


def _params(serving: Serving, body: ChatRequest, turn: Turn) -> SamplingParams | BeamSearchParams:
    if body.use_beam_search:
        if body.tools:
            raise ApiError("tools have no meaning with use_beam_search=true", param="tools", code="invalid_value")
        most = body.most_tokens
        return body.beam_params(most_tokens=serving.engine.max_model_len if most is None else most)
    extra: dict[str, Any] = {"max_tokens": body.most_tokens, **turn.parameters()}
    if body.logprobs:
        extra["logprobs"] = body.top_logprobs or 0
    return body.sampling_params(serving.engine.get_default_sampling_params(), **extra)
