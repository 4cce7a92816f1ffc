"""`/v1/cache/pins`: prefixes that stay in the pool for so many seconds."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field

from jpaged.outputs import PinnedPrefix
from jpaged.server.bodies import NOTHING, Body, FieldClasses
from jpaged.server.caller import Caller, caller_of
from jpaged.server.errors import ApiError, refused, shortened
from jpaged.server.openai.bodies.chat import SENT_AS_MESSAGES, Message, Tool
from jpaged.server.openapi import GENERATES, errors
from jpaged.server.serving import Serving, serving_of
from jpaged.server.streaming import while_connected

router = APIRouter()
PATH = "/v1/cache/pins"
DEFAULT_SECONDS = 300.0
MOST_SECONDS = 86_400.0
MOST_PINS = 64
"""Limit on the pins of a key."""
POOL_SHARE = 0.5
"""Largest part of the pool that the pins of all keys may take, so that no key's pins leave others one request at a
time for a day."""


class PinRequest(Body):
    """A prefix to be pinned: a text, tokens, or the beginning of a conversation.

    Attributes:
        seconds: how long it stays from when it is computed.
        cache_salt: that of the requests which are to share it.
    """

    classes: ClassVar[FieldClasses] = NOTHING

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seconds: float = Field(DEFAULT_SECONDS, gt=0, le=MOST_SECONDS, allow_inf_nan=False)
    cache_salt: str | None = Field(None, min_length=1)


@router.post(PATH, responses=GENERATES)
async def pin(body: PinRequest, request: Request) -> dict[str, Any]:
    """Keep a prefix in the pool for so many seconds; requests that run go on while it is computed."""
    serving = serving_of(request)
    caller = serving.begin(request)
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("a pin takes either prompt or messages", param="prompt", code="invalid_value")
    if len(await _own(serving, caller)) >= MOST_PINS:
        raise ApiError(f"{MOST_PINS} prefixes are pinned with this key: end one", status=429, code="too_many_pins")
    sent_as = (
        {**SENT_AS_MESSAGES, "prompt_token_ids": "prompt"} if body.prompt is None else {"prompt_token_ids": "prompt"}
    )
    try:
        prompt = await _prompt(serving, body)
        work = serving.engine.pin_prefix(
            prompt,
            cache_salt=caller.salted(body.cache_salt),
            seconds=body.seconds,
            name=f"{_owner(caller)}-{uuid.uuid4().hex[:16]}",
            most_share=POOL_SHARE,
        )
        pinned = await while_connected(request, caller, work)
    except ValueError as error:
        raise refused(error, PinRequest.model_fields, sent_as) from error
    return _shown(pinned)


@router.get(PATH)
async def pins(request: Request) -> dict[str, Any]:
    """List the prefixes that are pinned with this key."""
    own = await _own(serving_of(request), caller_of(request))
    return {"object": "list", "data": [_shown(pinned) for pinned in own.values()]}


@router.delete(PATH + "/{pin_id}", responses=errors(404))
async def unpin(pin_id: str, request: Request) -> dict[str, Any]:
    """End a pin of this key, so that its prefix can be evicted."""
    serving, caller = serving_of(request), caller_of(request)
    pinned = (await _own(serving, caller)).get(pin_id)
    try:
        if pinned is None:
            raise ValueError(pin_id)
        await serving.engine.unpin(pinned)
    except ValueError as error:
        message = f"no prefix is pinned as {shortened(pin_id)!r}, or no longer"
        raise ApiError(message, status=404, param="pin_id", code="pin_not_found") from error
    return {"id": pin_id, "object": "cache.pin", "deleted": True}


async def _prompt(serving: Serving, body: PinRequest) -> Mapping[str, Any]:
    """Return the prefix as the engine takes it."""
    if body.messages is None:
        return {"prompt" if isinstance(body.prompt, str) else "prompt_token_ids": body.prompt}
    messages = [message.as_template_takes_it(f"messages.{i}") for i, message in enumerate(body.messages)]
    serving.check_parts(messages)
    return await asyncio.to_thread(
        serving.engine.chat_prompt,
        messages,
        add_generation_prompt=False,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=None if body.tools is None else [tool.in_turn().shown() for tool in body.tools],
    )


async def _own(serving: Serving, caller: Caller) -> dict[str, PinnedPrefix]:
    """Return the prefixes that are pinned with the caller's key, by id; a restart keeps their names."""
    start = f"{_owner(caller)}-"
    every = await serving.engine.pinned_prefixes()
    return {pinned.name: pinned for pinned in every if pinned.name is not None and pinned.name.startswith(start)}


def _owner(caller: Caller) -> str:
    name = "" if caller.key is None else caller.key.name
    return f"pin-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _shown(pinned: PinnedPrefix) -> dict[str, Any]:
    left = pinned.seconds_left
    return {"id": pinned.name, "object": "cache.pin", "tokens": pinned.num_tokens, "seconds_left": left}
