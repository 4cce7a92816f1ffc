"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from jpaged.server.anthropic.bodies import Conversation, CountRequest, MessagesRequest
from jpaged.server.anthropic.rendering import MessageBlocks
from jpaged.server.bodies import unhonoured
from jpaged.server.caller import Caller
from jpaged.server.messages.turn_form import TurnForm
from jpaged.server.openapi import GENERATES
from jpaged.server.serving import Serving, serving_of
from jpaged.server.streaming import STREAMED, answered, event, while_connected

router = APIRouter()
_PLACES = {
    "thinks": "thinking.type",
    "thought_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}


@router.post("/v1/messages", response_model=None, responses=STREAMED | GENERATES)
async def message(body: MessagesRequest, request: Request) -> Response:
    """Write the next message of a conversation."""
    serving = serving_of(request)
    caller = serving.begin(request)
    serving.check_model(body.model)
    answer, patience = _Answer(serving, body, caller), serving.settings.stall_timeout
    return await answered(request, caller, answer, streamed=bool(body.stream), stall_timeout=patience)


@router.post("/v1/messages/count_tokens", responses=GENERATES)
async def count_tokens(body: CountRequest, request: Request) -> dict[str, Any]:
    """Return the number of a conversation's tokens, also if they do not fit."""
    serving = serving_of(request)
    caller = serving.begin(request)
    serving.check_model(body.model)
    form, named = _form(serving, body)
    prompt = await while_connected(request, caller, serving.rendered(form, counts=True))
    return {"input_tokens": len(prompt["prompt_token_ids"]), **named}


def _form(serving: Serving, body: Conversation) -> tuple[TurnForm, dict[str, Any]]:
    """Return the turn that a request asks for, and the answer's field of what is not honoured."""
    form = serving.form_of(body.turn(serving.engine.get_default_sampling_params()))
    controls = {_PLACES[name]: reason for name, reason in form.unhonoured.items()}
    return form, serving.not_honoured(unhonoured(body) | controls)


class _Answer:
    """One message."""

    def __init__(self, serving: Serving, body: MessagesRequest, caller: Caller) -> None:
        self._serving = serving
        self._caller = caller
        self._form, named = _form(serving, body)
        if body.metadata is not None and body.metadata.user_id is not None:
            caller.log["user"] = body.metadata.user_id
        head = {"model": body.model or serving.settings.model, **named}
        self._blocks = MessageBlocks(head, caller.answer_id, body.max_tokens, omits_thoughts=body.hides_thoughts)

    async def events(self) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yield the events of the message."""
        async with aclosing(await self._serving.answer(self._form, self._caller)) as steps:
            async for step in steps:
                for piece in step.pieces:
                    for each in piece.events:
                        for made in self._blocks.add(each):
                            yield made

    async def whole(self) -> dict[str, Any]:
        """Return the message."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._blocks.message

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the message as server-sent events."""
        async with aclosing(self.events()) as events:
            async for kind, fields in events:
                yield event({"type": kind, **fields}, kind)
