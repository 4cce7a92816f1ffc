"""`/v1/responses`: write, read, cancel and delete responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from jpaged.server.errors import ApiError, shortened
from jpaged.server.openai.bodies.responses import ResponsesRequest
from jpaged.server.openai.responses.job import Job
from jpaged.server.openai.responses.store import ResponseStore
from jpaged.server.openapi import GENERATES, errors
from jpaged.server.serving import serving_of
from jpaged.server.streaming import STREAMED, stream, while_connected, whole

router = APIRouter()


def _store(request: Request) -> ResponseStore:
    return request.app.state.responses


@router.post("/v1/responses", response_model=None, responses=STREAMED | GENERATES)
async def respond(body: ResponsesRequest, request: Request) -> Response:
    """Write a response."""
    serving = serving_of(request)
    caller = serving.begin(request)
    serving.check_model(body.model)
    job = _store(request).begin(body, caller)
    if body.background and not body.stream:
        return whole(job.response)
    if body.stream:
        chunks = job.follow() if body.background else _followed(job)
        return await stream(request, caller, chunks, serving.settings.stall_timeout)
    try:
        return whole(await while_connected(request, caller, job.result()))
    finally:
        await job.cancel()


async def _followed(job: Job) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response that ends when its reader disconnects."""
    try:
        async for chunk in job.follow():
            yield chunk
    finally:
        await job.cancel()


@router.get("/v1/responses/{response_id}", response_model=None, responses=STREAMED | errors(404, 503))
async def read(
    response_id: str,
    request: Request,
    stream_events: bool = Query(False, alias="stream"),
    starting_after: int = Query(-1, ge=-1),
) -> Response:
    """Return a stored response, or its events from a number on until it ends."""
    serving = serving_of(request)
    caller = serving.begin(request)
    for name in request.query_params.keys() - {"stream", "starting_after"}:
        raise ApiError(f"{name} is not supported", param=name, code="unsupported_parameter")
    if starting_after >= 0 and not stream_events:
        message = f"starting_after={starting_after} needs stream=true"
        raise ApiError(message, param="starting_after", code="invalid_value")
    job = _store(request).find(caller, response_id)
    if starting_after >= 0 and job.begins_anew:
        message = f"starting_after={starting_after}: the events before the server's restart are unknown"
        raise ApiError(message, param="starting_after", code="invalid_value")
    if stream_events:
        caller.take()  # by the request that began the response
        return await stream(request, caller, job.follow(starting_after + 1), serving.settings.stall_timeout)
    return whole(job.now)


@router.delete("/v1/responses/{response_id}", responses=errors(404, 503))
async def delete(response_id: str, request: Request) -> dict[str, Any]:
    """Delete a response; a running one ends."""
    await _store(request).delete(serving_of(request).begin(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", response_model=None, responses=errors(404, 503))
async def cancel(response_id: str, request: Request) -> Response:
    """End a background response with its output so far, and return it."""
    job = _store(request).find(serving_of(request).begin(request), response_id)
    if not job.response["background"]:
        message = "only responses with background=true can be cancelled: others end with their connection"
        raise ApiError(message, param="response_id", code="invalid_value")
    await job.cancel()
    return whole(job.response)


@router.get("/v1/responses/{response_id}/input_items", responses=errors(404, 503))
async def input_items(
    response_id: str,
    request: Request,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """List input items of a response, the last one first unless the order is "asc", those after an item's id."""
    for name in request.query_params.keys() - {"order", "after", "limit"}:
        raise ApiError(f"{name} is not supported", param=name, code="unsupported_parameter")
    job = _store(request).find(serving_of(request).begin(request), response_id)
    by_id: dict[str, dict[str, Any]] = {}
    for i, item in enumerate(job.input):  # a client may have given an id twice, or none
        own = item.get("id")
        name = f"{response_id}_item_{i}" if own is None or own in by_id else own
        by_id[name] = _item(item) | {"id": name}
    ids = list(by_id) if order == "asc" else list(by_id)[::-1]
    if after is not None and after not in ids:
        message = f"after={shortened(after)!r} is no id of the response's {len(ids)} input items"
        raise ApiError(message, param="after", code="invalid_value")
    start = 0 if after is None else ids.index(after) + 1
    shown = ids[start : start + limit]
    ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
    more = start + limit < len(ids)
    return {"object": "list", "data": [by_id[name] for name in shown], "has_more": more, **ends}


def _item(given: dict[str, Any]) -> dict[str, Any]:
    """Return an item of input as OpenAI lists it: of a type, and a message's text as a part."""
    item: dict[str, Any] = {"type": "message"} | given
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return item
