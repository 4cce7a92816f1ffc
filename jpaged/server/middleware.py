"""The server's outermost layer: gives every request an id, lets in those with a key, counts them and writes the log."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.server.access import Rates, find_key
from jpaged.server.caller import STATE, Caller
from jpaged.server.errors import CLIENT_GONE, ApiError, described
from jpaged.server.logs import REQUEST_ID
from jpaged.server.memory_page import OPEN_PATHS
from jpaged.server.serving import Serving

logger = logging.getLogger(__name__)
access = logging.getLogger("jpaged.access")
OPEN = frozenset({"/health", *OPEN_PATHS})
"""Paths that need no key: what a load balancer asks, and files that are the same for every engine."""
ADMIN = ("/metrics", "/memory")
"""Paths that concern all callers, for the keys of admins; `/memory/...` too."""


class Gate:
    """An ASGI middleware around a whole app.

    Args:
        app: what it lets requests in to.
        serving: see `Serving`; its count of active requests is kept here.
    """

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        self._rates = Rates(serving.settings.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":  # there is none here
                await send({"type": "websocket.close", "code": 1000})
                return
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = Caller(
            _request_id(headers),
            idempotency_key=headers.get("idempotency-key") or None,
            trace_headers={name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
        )
        scope.setdefault("state", {})[STATE] = caller
        start, status, begun = time.monotonic(), CLIENT_GONE, False

        async def told(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                MutableHeaders(scope=message)["X-Request-Id"] = caller.request_id
            await send(message)

        counts = scope["method"] == "POST"
        before = REQUEST_ID.set(caller.request_id)
        self._serving.num_active += counts
        try:
            try:
                self._let_in(scope, caller)
            except ApiError as error:
                await error.response()(scope, receive, told)
            else:
                await self._app(scope, receive, told)
        except Exception as error:  # nobody foresaw it
            logger.exception("a request failed", extra={"request_id": caller.request_id})
            if begun:
                raise
            await described(error).response()(scope, receive, told)
        finally:
            REQUEST_ID.reset(before)
            self._serving.num_active -= counts
            self._log(scope, caller, caller.log.pop("status", status), time.monotonic() - start)

    def _let_in(self, scope: Scope, caller: Caller) -> None:
        """Find the caller's key.

        Raises:
            ApiError: it has none, or one that may not do this, or asks too often.
        """
        keys, path = self._serving.settings.keys, route_path(scope)
        if not keys or path in OPEN or scope["method"] == "OPTIONS":
            return
        scheme, _, secret = Headers(scope=scope).get("authorization", "").partition(" ")
        key = find_key(keys, secret.strip()) if scheme.lower() == "bearer" else None
        if key is None:
            raise ApiError(
                "Incorrect API key provided, or none: send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        caller.key = key
        if any(path == admin or path.startswith(f"{admin}/") for admin in ADMIN) and not key.admin:
            raise ApiError(f"{path} is for the keys of admins", status=403, code="admin_key_needed")
        if scope["method"] == "POST":
            self._rates.take(key)

    def _log(self, scope: Scope, caller: Caller, status: int, seconds: float) -> None:
        if not access.isEnabledFor(logging.INFO):
            return
        client = scope.get("client")
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": caller.request_id,
            "client": None if client is None else client[0],
            "key": None if caller.key is None else caller.key.name,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **caller.log,
        }
        access.info("%s", json.dumps(line))


def _request_id(headers: Headers) -> str:
    """Return the client's id, where it can stand in a log and a header, or a new one."""
    given = headers.get("x-request-id", "")
    return given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else uuid.uuid4().hex


class BodyLimit:
    """An ASGI middleware.

    Args:
        app: what gets the bodies within the limit.
        max_bytes: size of the largest.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared, size = Headers(scope=scope).get("content-length", ""), 0

        async def limited() -> Message:
            nonlocal size
            if declared.isdecimal() and int(declared) > self._max_bytes:
                raise self._error()
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, limited, send)

    def _error(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than the {self._max_bytes} bytes that the server takes")


def route_path(scope: Scope) -> str:
    """Return the path of a request without the ASGI root path before it, as Starlette's routing does.

    Whatever decides by the path has to decide by this one: "/llm/metrics" is "/metrics" to an app at "/llm".
    """
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", ""))
    return below if not below or below.startswith("/") else path
