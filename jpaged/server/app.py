"""Builds the ASGI app: routers, error handlers and middleware. `routers_of` is the list of the server's paths."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from jpaged import AsyncLLM, __version__
from jpaged.server.access import PathAccess
from jpaged.server.endpoints import cache_events, pages, pins, status, tokens
from jpaged.server.memory_page import memory_routes
from jpaged.server.middleware import BodyLimit, HostCheck, RequestMiddleware
from jpaged.server.openai.responses.store import ResponseStore
from jpaged.server.openapi import ERRORS, describe_access
from jpaged.server.protocols import add_handlers, protocols
from jpaged.server.serving import Serving
from jpaged.server.settings import ServerSettings
from jpaged.server.tracing import Traces


def routers_of(serving: Serving) -> tuple[APIRouter, ...]:
    """Return the routers of all paths. A new path is one router, named here or in its protocol's row.

    A path needs a key unless its endpoint is marked by `access.open_to_all` or `access.admin_only`.
    """
    memory = memory_routes(
        serving.engine,
        stopping=lambda: serving.draining,
        replicas=serving.engine.config.data_parallel_size,
        model=serving.settings.model,
        stall_timeout=serving.settings.stall_timeout,
    )
    info = (tokens.info_router,) if serving.settings.tokenizer_info else ()
    return (
        pages.router,
        status.router,
        *(router for protocol in protocols() for router in protocol.routers()),
        tokens.router,
        *info,
        pins.router,
        cache_events.router,
        memory,
    )


def create_app(engine: AsyncLLM, settings: ServerSettings, traces: Traces | None = None, replica: str = "") -> FastAPI:
    """Return the app of a server. The caller shuts the engine down afterwards.

    Args:
        traces: records a span for each request; None: no spans.
        replica: name of this server among several; it becomes part of the ids of stored responses.
    """
    # FastAPI's pages of the schema would load scripts from another host; ours is in endpoints/pages.py.
    app = FastAPI(title="jpaged", version=__version__, docs_url=None, redoc_url=None)
    serving = app.state.serving = Serving(engine, settings, traces)
    app.state.responses = ResponseStore(
        serving,
        settings.max_stored_responses,
        None if settings.state_dir is None else settings.state_dir / "responses",
        replica,
    )
    add_handlers(app)
    routers = routers_of(serving)
    for router in routers:
        app.include_router(router, responses=ERRORS)
    paths = PathAccess(routers)
    describe_access(app, paths)
    app.add_middleware(BodyLimit, max_bytes=settings.body_bytes(serving.engine.max_media_bytes))
    if settings.is_local and not settings.keys and not settings.allow_anonymous:
        app.add_middleware(HostCheck, hosts=("localhost", "127.0.0.1", "[::1]", settings.host))
    app.add_middleware(RequestMiddleware, serving=serving, paths=paths)  # outside all added before
    if settings.cors_origins:  # outside the key check: pages may read refusals, and preflight requests have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app
