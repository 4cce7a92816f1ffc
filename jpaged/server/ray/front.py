"""Takes requests and sends each to a replica, and to another one where that replica ends or refuses before it began."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any, Protocol

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from jpaged.server.errors import ApiError, described
from jpaged.server.ray.call import REPLICA, Hint
from jpaged.server.ray.prefix_chain import prefix_chain
from jpaged.server.streaming import event

logger = logging.getLogger(__name__)
ATTEMPTS = 4
"""Replicas that a request is sent to, at most, until one begins to answer it."""
NAMED = "X-Jpaged-Replica"
"""Header of an answer: the replica that gave it."""
_ELSEWHERE = frozenset({"engine_busy", "engine_stopped", "draining"})
"""Codes of refusals that another replica may not make."""
_PLAIN = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)


class Replicas(Protocol):
    """What sends a request to one of several replicas: a deployment's handle, or a test's stand-in."""

    def remote(self, hint: Hint, scope: dict[str, Any], body: bytes) -> Any:
        """Return an asynchronous iterator of lists of ASGI messages, with a method `cancel`."""


class _NotBegun(Exception):
    """A replica ended, or refused, before anything of an answer was sent on.

    Args:
        replica: its name, where it is known.
        refusal: what it answered; empty where it ended.
    """

    def __init__(self, replica: str | None, refusal: list[Message]) -> None:
        super().__init__(replica)
        self.replica = replica
        self.refusal = refusal


class Front:
    """An ASGI app that answers nothing itself.

    Args:
        replicas: where requests go.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        answering = asyncio.ensure_future(self._answer(scope, body, send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answering.done():
                answering.cancel()
                await asyncio.wait((answering,))
        if not answering.cancelled():
            answering.result()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        plain = {name: scope[name] for name in _PLAIN if name in scope}
        owner = hashlib.sha256(Headers(scope=scope).get("authorization", "").encode()).hexdigest()
        chain = prefix_chain(scope["path"], body, owner)
        avoid: set[str] = set()
        refusal: list[Message] = []
        for _ in range(ATTEMPTS):
            try:
                return await self._once(Hint(chain, frozenset(avoid)), plain, body, send)
            except _NotBegun as error:
                logger.info("replica %s did not begin to answer; another one is asked", error.replica)
                refusal = error.refusal
                if error.replica is not None:
                    avoid.add(error.replica)
        if refusal:  # what a replica says itself is better than what can be said of it
            for message in refusal:
                await send(message)
            return None
        told = f"{ATTEMPTS} replicas ended before they began to answer"
        lost = ApiError(told, status=503, code="replica_lost", headers={"Retry-After": "5"})
        return await lost.response()(scope, _nothing, send)

    async def _once(self, hint: Hint, scope: dict[str, Any], body: bytes, send: Send) -> None:
        """Let one replica answer.

        Raises:
            _NotBegun: it did not, and nothing was sent on.
            Exception: it failed in the middle of an answer that cannot say so.
        """
        outputs = self._replicas.remote(hint, scope, body)
        name: str | None = None
        start: Message | None = None
        begun = False
        try:
            async for message in _each(outputs):
                if message["type"] == REPLICA:
                    name = message["name"]
                elif message["type"] == "http.response.start":
                    start = message
                    headers = MutableHeaders(scope=start)
                    headers[NAMED] = name or ""
                    del headers["X-Request-Id"]  # Serve's proxy gives it again
                else:
                    if not begun:
                        assert start is not None
                        if _refused(start, message):
                            raise _NotBegun(name, [start, message])
                        begun = True
                        await send(start)
                    await send(message)
        except _NotBegun:
            raise
        except Exception as error:
            if not begun:
                if isinstance(error, RayActorError):
                    raise _NotBegun(name, []) from error
                return await _error(error).response()(scope, _nothing, send)
            logger.warning("replica %s: %s while it was answering", name, type(error).__name__)
            if start is None or not _is_stream(start):
                raise  # which breaks the connection: nothing that is half there says so itself
            await send({"type": "http.response.body", "body": event(_error(error).body), "more_body": False})
        finally:
            with contextlib.suppress(Exception):
                outputs.cancel()


def _error(error: Exception) -> ApiError:
    """Return what a client is told of an error that came instead of an answer, or in its middle."""
    if isinstance(error, RayActorError):
        return ApiError("the replica that gave this answer has ended", status=503, code="replica_lost")
    if isinstance(error, BackPressureError):
        return ApiError(str(error), status=429, code="engine_busy", headers={"Retry-After": "1"})
    if isinstance(error, DeploymentUnavailableError):
        return ApiError("no replica can be started", status=503, code="replica_lost", headers={"Retry-After": "5"})
    logger.error("a request failed", exc_info=error)
    return described(error)


def _is_stream(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")


async def _each(outputs: AsyncIterator[list[Message]]) -> AsyncIterator[Message]:
    async for messages in outputs:
        for message in messages:
            yield message


def _refused(start: Message, body: Message) -> bool:
    """Tell whether an answer says that this replica, of all there are, cannot take the request now."""
    if start["status"] not in (429, 503):
        return False
    try:
        return json.loads(body.get("body", b""))["error"]["code"] in _ELSEWHERE
    except (ValueError, KeyError, TypeError):
        return False


async def _gone(receive: Receive) -> None:
    """Return when the client closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
