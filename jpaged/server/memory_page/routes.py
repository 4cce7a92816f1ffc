"""The routes of the memory page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import StreamingResponse

from jpaged.server.memory_page.feed import RATE, MemoryFeed, WatchedEngine

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the page: it loads its own script and nothing else."""

OPEN_PATHS = ("/memory", "/memory/page.js")
"""Paths that need no key, as a browser cannot bring one when it opens a page; they are the same for every engine."""

HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}


def memory_routes(
    engine: WatchedEngine,
    *,
    dependencies: Sequence[Any] = (),
    stopping: Callable[[], bool] = lambda: False,
    rate: float = RATE,
    replicas: int = 1,
) -> APIRouter:
    """Return the routes of the page that draws an engine's memory.

    ``/memory`` and ``/memory/page.js`` are files that tell nothing of the engine. ``/memory/events`` is the stream; the
    page asks for a key where the server answers 401 or 403, and sends it as a bearer token.

    Args:
        engine: an `AsyncLLM`.
        dependencies: FastAPI dependencies that guard the stream.
        stopping: tells that the server is about to end, so that streams end too.
        rate: messages a second.
        replicas: pools that the engine has; the page shows one of them.

    Raises:
        ValueError: rate is not in (0, 60].
    """
    if not 0 < rate <= 60:
        raise ValueError(f"rate={rate} messages a second is not in (0, 60]")
    router = APIRouter()
    feeds = [MemoryFeed(engine, stopping, interval=1 / rate, replica=number) for number in range(replicas)]

    @router.get("/memory", include_in_schema=False)
    async def page() -> Response:
        return Response(
            _file("page.html"), media_type="text/html", headers=HEADERS | {"Content-Security-Policy": POLICY}
        )

    @router.get("/memory/page.js", include_in_schema=False)
    async def script() -> Response:
        return Response(_file("page.js"), media_type="text/javascript", headers=HEADERS)

    @router.get("/memory/events", include_in_schema=False, dependencies=list(dependencies))
    async def events(replica: int = 0) -> Response:
        if not 0 <= replica < replicas:
            raise HTTPException(404, f"replica={replica} is not in [0, {replicas})")
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Replicas": str(replicas)}
        return StreamingResponse(_events(feeds[replica]), media_type="text/event-stream", headers=headers)

    return router


async def _events(feed: MemoryFeed) -> AsyncGenerator[str, None]:
    async for message in feed.messages():
        yield f"data: {message}\n\n"


def _file(name: str) -> bytes:
    return (files(__package__) / name).read_bytes()
