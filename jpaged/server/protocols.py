"""The protocols that the server speaks, and the form of errors at each path."""

from __future__ import annotations

from importlib import import_module

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from jpaged import EngineBusy, EngineStopped
from jpaged.server.caller import STATE
from jpaged.server.errors import CLIENT_GONE, ApiError, ClientGone, described, of_body
from jpaged.server.protocol import Protocol
from jpaged.vllm_names import ROUTES

PROTOCOLS = ["jpaged.server.openai.protocol", "jpaged.server.anthropic.protocol"]
"""Modules with the rows, each called `PROTOCOL`; a new protocol is a folder and its module here. They are imported when
they are asked for, since a protocol's folder uses this module."""


def protocols() -> list[Protocol]:
    """Return every protocol."""
    return [import_module(name).PROTOCOL for name in PROTOCOLS]


def protocol_of(path: str) -> Protocol:
    """Return the protocol of a path; one that no protocol names is the first one's."""
    return _named(path) or protocols()[0]


def protocol_for(scope: Scope) -> Protocol:
    """Return the protocol of a request: that of its path or, if no protocol names it, that of the client by its header;
    without one, the first."""
    if (named := _named(route_path(scope))) is not None:
        return named
    rows, headers = protocols(), Headers(raw=list(scope.get("headers", ())))
    return next((row for row in rows if row.header is not None and row.header in headers), rows[0])


def _named(path: str) -> Protocol | None:
    return next((protocol for protocol in protocols() if protocol.has(path)), None)


def batch_paths() -> tuple[str, ...]:
    """Return the paths that a line of a batch may name."""
    return tuple(path for protocol in protocols() for path in protocol.batch_paths)


def route_path(scope: Scope) -> str:
    """Return the path of a request without the ASGI root path, as Starlette's routing does.

    Every decision by path has to use this one: "/llm/metrics" is "/metrics" to an app mounted at "/llm".
    """
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", ""))
    return below if not below or below.startswith("/") else path


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """Return the HTTP response of an error, in the form of the request's protocol."""
    caller = scope.get("state", {}).get(STATE)
    request_id = None if caller is None else caller.request_id
    body = protocol_for(scope).error(error, request_id)
    return JSONResponse(body, error.status, headers=error.headers)


def add_handlers(app: Starlette) -> None:
    """Install handlers, so that every error of an app has the form of its path's protocol."""

    async def known(request: Request, error: Exception) -> Response:
        return error_response(described(error), request.scope)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(of_body(error), request.scope)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404 and (instead := ROUTES.get(request.url.path)):
            message = f"{message}: {request.url.path} is a path of vLLM's server that this one lacks: {instead}"
        return error_response(ApiError(message, status=error.status_code, headers=error.headers), request.scope)

    for kind in (ApiError, EngineBusy, EngineStopped, TimeoutError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http)
