"""`/v1/cache/events`: which cached blocks the engine has from now on, and which it lost, for routers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from jpaged.server.access import admin_only
from jpaged.server.errors import ApiError
from jpaged.server.openapi import errors
from jpaged.server.serving import serving_of

router = APIRouter()
MOST_EVENTS = 4096
"""Limit on the events of one answer."""


@router.get("/v1/cache/events", responses=errors(404))
@admin_only
async def cache_events(
    request: Request,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = MOST_EVENTS,
) -> dict[str, Any]:
    """List changes of cached blocks from a number on; `lost` says that earlier ones are not kept any more.

    Digests and salts are hexadecimal. The next events begin at `next`.
    """
    try:
        found = await serving_of(request).engine.cache_events(after, limit)
    except ValueError as error:
        raise ApiError(str(error), status=404, code="no_events") from error
    shown = [
        one._asdict() | {"digest": one.digest.hex(), "parent": one.parent.hex(), "salt": one.salt.hex()}
        for one in found.events
    ]
    return {"object": "list", "data": shown, "next": found.next, "lost": found.lost}
