"""Puts endpoints, errors and limits together to an ASGI app."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from jpaged import AsyncLLM, __version__
from jpaged.server.endpoints import chat, completions, responses, status, tokens
from jpaged.server.errors import add_handlers
from jpaged.server.memory_page import memory_routes
from jpaged.server.middleware import BodyLimit, Gate
from jpaged.server.responses import ResponseStore
from jpaged.server.serving import Serving
from jpaged.server.settings import ServerSettings
from jpaged.server.tracing import Traces

ROUTERS = (status.router, completions.router, chat.router, responses.router, tokens.router)


def create_app(engine: AsyncLLM, settings: ServerSettings, traces: Traces | None = None, replica: str = "") -> FastAPI:
    """Return the app of a server; whoever runs it shuts the engine down afterwards.

    Args:
        traces: gets a span for each request; None = none is written.
        replica: name of this server among several; responses that it keeps have it in their ids.
    """
    # The pages that draw the schema would load scripts from elsewhere; /openapi.json is the schema.
    app = FastAPI(title="jpaged", version=__version__, docs_url=None, redoc_url=None)
    serving = app.state.serving = Serving(engine, settings, traces)
    app.state.responses = ResponseStore(
        serving,
        settings.max_stored_responses,
        None if settings.state_dir is None else settings.state_dir / "responses",
        replica,
    )
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(
        memory_routes(
            engine,
            stopping=lambda: serving.draining,
            replicas=engine.config.data_parallel_size,
            stall_timeout=settings.stall_timeout,
        )
    )
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.is_local and not settings.keys and not settings.allow_anonymous:
        # A page of another site can give its own name this machine's address, but not the Host header of it.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "[::1]", settings.host])
    app.add_middleware(Gate, serving=serving)  # around all that was added before
    if settings.cors_origins:  # around the gate: pages may read its refusals, and browsers ask first without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app
