"""ASGI middleware: the outermost layer, which identifies, admits, counts and logs requests, and the limit on bodies."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.server.access import PathAccess, Rates, find_key
from jpaged.server.caller import STATE, Caller
from jpaged.server.errors import CLIENT_GONE, ApiError, described, shortened
from jpaged.server.logs import REQUEST_ID
from jpaged.server.protocols import error_response, protocol_for, route_path

if TYPE_CHECKING:  # Ray's front imports this module without an engine
    from jpaged.server.serving import Serving

logger = logging.getLogger(__name__)
access = logging.getLogger("jpaged.access")


class RequestMiddleware:
    """The outermost layer: gives every request an id, checks its key, counts it and writes its line of the log.

    Args:
        app: the app inside.
        serving: holds the keys, and the count of active requests that this class keeps.
        paths: the access that each path needs.
    """

    def __init__(self, app: ASGIApp, serving: Serving, paths: PathAccess) -> None:
        self._app = app
        self._serving = serving
        self._paths = paths
        self._rates = Rates(serving.settings.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":  # the server has no websockets
                await send({"type": "websocket.close", "code": 1000})
                return
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        caller = Caller(
            request_id,
            answer_id=f"{request_id}-{uuid.uuid4().hex[:12]}" if "x-request-id" in headers else request_id,
            idempotency_key=headers.get("idempotency-key") or None,
            trace_headers={name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
        )
        scope.setdefault("state", {})[STATE] = caller
        start, status, begun = time.monotonic(), CLIENT_GONE, False

        async def send_with_id(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                for name in {"X-Request-Id", protocol_for(scope).id_header}:
                    MutableHeaders(scope=message)[name] = caller.request_id
            await send(message)

        counts = scope["method"] == "POST"
        before = REQUEST_ID.set(caller.request_id)
        self._serving.num_active += counts
        try:
            try:
                self._admit(scope, caller)
            except ApiError as error:
                await error_response(error, scope)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:  # a defect: the app handles all errors that it expects
            logger.exception("a request failed", extra={"request_id": caller.request_id})
            if begun:
                raise
            await error_response(described(error), scope)(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(before)
            self._serving.num_active -= counts
            self._log(scope, caller, caller.log.pop("status", status), time.monotonic() - start)

    def _admit(self, scope: Scope, caller: Caller) -> None:
        """Find the caller's key and check that it may make this request.

        Raises:
            ApiError: the request has no key, the key has no access to the path, or its rate is used up.
        """
        keys, path = self._serving.settings.keys, route_path(scope)
        if not keys or self._paths.is_open(path) or scope["method"] == "OPTIONS":
            return
        protocol = protocol_for(scope)
        secret = protocol.secret(Headers(scope=scope))
        key = None if secret is None else find_key(keys, secret)
        if key is None:
            raise ApiError(
                f"Incorrect API key provided, or none: send the header {protocol.secret_header}",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        caller.key = key
        if self._paths.is_for_admins(path) and not key.admin:
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
    """Return the client's id if it is fit for a log and a header, else a new one."""
    given = headers.get("x-request-id", "")
    return given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else uuid.uuid4().hex


MOST_VALUES = 2**20
"""Limit on the values in a body. Parsing holds the event loop, for 0.1 s with so many."""
MOST_CONTAINERS = 2**15
"""Limit on the lists and objects in a body: validation makes a Python object of most of them, within a second."""
MOST_MEMBERS = 2**17
"""Limit on the members of the objects in a body, each of which takes a text of its own."""


class HostCheck:
    """Refuses requests whose Host header is no name of this machine.

    Another site's page can resolve its own name to this machine, but cannot send this machine's Host header.

    Args:
        app: the app inside.
        hosts: the names that are accepted, with any port.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if re.sub(r":\d*$", "", host).lower() not in self._hosts:
                message = (
                    f"the Host header {shortened(host)!r} is no name of this machine, and the server has no key: "
                    "call it as localhost, or start it with --api-key or --allow-anonymous"
                )
                await error_response(ApiError(message, code="invalid_host"), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies that are too large before they are read, in the shape of all other errors.

    It also counts the values of a body as it arrives: 8 MB of ``[],[],[]`` would hold the event loop for seconds once
    it is parsed. Starlette's own limit answers in plain text and outside the log.

    Args:
        app: the app inside.
        max_bytes: size of the largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared, size = Headers(scope=scope).get("content-length", ""), 0
        count = JsonCount()

        async def limited() -> Message:
            nonlocal size
            if declared.isdecimal() and int(declared) > self._max_bytes:
                raise self._error()
            message = await receive()
            body = message.get("body", b"")
            size += len(body)
            if size > self._max_bytes:
                raise self._error()
            if b"\0" in body:  # UTF-16 or UTF-32, which json.loads would read and `JsonCount` does not
                raise HTTPException(400, "the body is not JSON in UTF-8")
            count.add(body)
            for number, most, things in (
                (count.values, MOST_VALUES, "values"),
                (count.containers, MOST_CONTAINERS, "lists and objects"),
                (count.members, MOST_MEMBERS, "members of objects"),
            ):
                if number > most:
                    raise HTTPException(400, f"the body has more {things} than the limit of {most}")
            return message

        await self._app(scope, limited, send)

    def _error(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than the limit of {self._max_bytes} bytes")


class JsonCount:
    """Counts the values of a JSON text that comes in pieces, in linear time and without parsing it.

    Attributes:
        containers: lists and objects so far.
        members: members of objects so far.
        values: these and all other values so far, by their commas, so that empty lists count twice.

    >>> count = JsonCount()
    >>> for piece in (b'{"a": [1, "[[,', b'\\\\\\\\, 2', b'", 3]}'):
    ...     count.add(piece)
    >>> count.containers, count.values
    (2, 4)
    """

    def __init__(self) -> None:
        self.containers = self.members = self.values = 0
        self._in_text = False
        self._rest = b""  # an escape that is cut in two

    def add(self, piece: bytes) -> None:
        """Count the values that begin in the next piece."""
        piece = self._rest + piece
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        kept = len(piece) - num_backslashes % 2
        piece, self._rest = piece[:kept], piece[kept:]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_text :: 2])
        self._in_text ^= len(parts) % 2 == 0
        opened = outside.count(b"[") + outside.count(b"{")
        self.containers += opened
        self.members += outside.count(b":")
        self.values += opened + outside.count(b",")
