"""Routes of the memory page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Request, Response

from jpaged.server.access import admin_only, open_to_all
from jpaged.server.caller import STATE, Caller
from jpaged.server.memory_page.feed import RATE, MemoryFeed, WatchedEngine
from jpaged.server.streaming import EventStream

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the page, which loads its own script and nothing else."""

HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}


def memory_routes(
    engine: WatchedEngine,
    *,
    dependencies: Sequence[Any] = (),
    stopping: Callable[[], bool] = lambda: False,
    rate: float = RATE,
    replicas: int = 1,
    model: str = "",
    stall_timeout: float = 60.0,
) -> APIRouter:
    """Return the routes of the page that draws an engine's memory.

    ``/memory`` and ``/memory/page.js`` are the same files for every engine. They need no key, since a browser sends
    none when it opens a page. ``/memory/events`` is the stream, for admins. If the server answers 401 or 403, the page
    asks for a key and sends it as a bearer token.

    Args:
        engine: an `AsyncLLM`.
        dependencies: FastAPI dependencies that guard the stream.
        stopping: returns whether the server is about to end, so that streams end too.
        rate: messages a second.
        replicas: number of the engine's pools; the page shows one of them.
        model: the model's name, which the page shows to those who may read the stream.
        stall_timeout: seconds that a page may stop reading before the stream ends.

    Raises:
        ValueError: rate is not in (0, 60].
    """
    if not 0 < rate <= 60:
        raise ValueError(f"rate={rate} messages a second is not in (0, 60]")
    router = APIRouter()
    feeds = [MemoryFeed(engine, stopping, interval=1 / rate, replica=number) for number in range(replicas)]

    @router.get("/memory", include_in_schema=False)
    @open_to_all
    async def page() -> Response:
        return Response(
            _file("page.html"), media_type="text/html", headers=HEADERS | {"Content-Security-Policy": POLICY}
        )

    @router.get("/memory/page.js", include_in_schema=False)
    @open_to_all
    async def script() -> Response:
        return Response(_file("page.js"), media_type="text/javascript", headers=HEADERS)

    @router.get("/memory/events", include_in_schema=False, dependencies=list(dependencies))
    @admin_only
    async def events(request: Request, replica: int = 0) -> Response:
        if not 0 <= replica < replicas:
            raise HTTPException(404, f"replica={replica} is not in [0, {replicas})")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Replicas": str(replicas)}
        headers["X-Model"] = quote(model)  # headers are ASCII
        caller = request.scope.get("state", {}).get(STATE) or Caller("memory")  # the routes may be part of another app
        return EventStream(None, _events(feeds[replica]), caller, stall_timeout, headers)

    return router


async def _events(feed: MemoryFeed) -> AsyncGenerator[bytes, None]:
    async with aclosing(feed.messages()) as messages:
        async for message in messages:
            yield b"data: " + message.encode() + b"\n\n"


def _file(name: str) -> bytes:
    return (files(__package__) / name).read_bytes()
