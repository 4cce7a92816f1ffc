"""Refuses bodies that are too large before they are read, in the shape of all other errors (Starlette's own limit
answers in plain text, outside the log)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
