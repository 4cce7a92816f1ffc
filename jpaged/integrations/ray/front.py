"""Sends each request to a replica, and to another one if that replica ends or refuses before it answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.integrations.ray.every_replica import (
    Answers,
    Replicas,
    WholeAnswer,
    ask_all,
    merged_health,
    merged_load,
    merged_metrics,
)
from jpaged.integrations.ray.hints import REPLICA, Hint, need_of, prefix_chain
from jpaged.server.errors import ApiError, described
from jpaged.server.protocols import error_response, protocol_for, route_path
from jpaged.server.streaming import disconnected, event

logger = logging.getLogger(__name__)
ATTEMPTS = 4
"""Limit on the replicas that a request is sent to until one begins to answer."""
NAMED = "X-Jpaged-Replica"
"""Header of an answer with the name of its replica."""
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


class _NotBegun(Exception):
    """A replica ended, or refused, before the front sent any part of its answer.

    Args:
        replica: its name, if known.
        refusal: its answer; empty if it ended.
    """

    def __init__(self, replica: str | None, refusal: list[Message]) -> None:
        super().__init__(replica)
        self.replica = replica
        self.refusal = refusal


class Front:
    """An ASGI app that forwards requests. It answers itself only for paths that concern all replicas.

    Args:
        replicas: takes requests with their hints.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._of_all: dict[str, Callable[[dict[str, Any], Send], Awaitable[None]]] = {
            "/metrics": self._metrics,
            "/v1/load": self._load,
            "/memory/events": self._memory,
            "/health": self._health,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        answering = asyncio.ensure_future(self._answer_path(scope, body, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answering.done():
                answering.cancel()
                await asyncio.wait((answering,))
        if not answering.cancelled():
            answering.result()

    async def _answer_path(self, scope: Scope, body: bytes, send: Send) -> None:
        plain = {name: scope[name] for name in _PLAIN if name in scope}
        respond = self._of_all.get(route_path(scope)) if scope["method"] == "GET" else None
        if respond is not None:
            try:
                await respond(plain, send)
            except ApiError as error:
                await error_response(error, scope)(scope, _no_body, send)
            except _NotBegun as error:
                await _not_begun(error.refusal, "the replica has ended", None)(scope, _no_body, send)
        else:
            await self._answer(scope, plain, body, send)

    async def _metrics(self, scope: dict[str, Any], send: Send) -> None:
        """Answer with the metrics of all replicas.

        Raises:
            ApiError: no replica has answered.
        """
        answers = await self._ask_all(scope)
        if refused := _refusal(answers):
            return await _pass_on(refused, send)
        texts = {name: answer.body.decode() for name, answer in answers.by_name.items()}
        merged = await asyncio.to_thread(merged_metrics, texts, whole=answers.whole)
        return await Response(merged, media_type=CONTENT_TYPE_LATEST)(scope, _no_body, send)

    async def _load(self, scope: dict[str, Any], send: Send) -> None:
        """Answer with the load of all replicas.

        Raises:
            ApiError: as `_metrics`.
        """
        answers = await self._ask_all(scope)
        if refused := _refusal(answers):
            return await _pass_on(refused, send)
        return await JSONResponse(merged_load(answers))(scope, _no_body, send)

    async def _health(self, scope: dict[str, Any], send: Send) -> None:
        """Answer with the health of all replicas.

        Raises:
            ApiError: as `_metrics`.
        """
        status, said = merged_health(await self._ask_all(scope, silent=True))
        await JSONResponse(said, status)(scope, _no_body, send)

    async def _memory(self, scope: dict[str, Any], send: Send) -> None:
        """Stream the memory of the replica that the query's `server` names, or of the only one.

        Raises:
            ApiError: there is no replica of that name, or several and no name.
            _NotBegun: the replica ended, or refused.
        """
        named = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("server")
        found = await self._ask_all(scope | {"path": "/version", "raw_path": b"/version"})
        if refused := _refusal(found):
            return await _pass_on(refused, send)
        answers = found.by_name
        chosen = named[0] if named else next(iter(answers)) if len(answers) == 1 else None
        if chosen not in answers:
            problem = f"server={chosen} is not one of the replicas" if named else "several replicas have a memory each"
            names = ", ".join(sorted(answers))
            raise ApiError(f"{problem}; open /memory?server=NAME with one of {names}", param="server")
        return await self._once(Hint(only=chosen), scope, b"", send)

    async def _ask_all(self, scope: dict[str, Any], *, silent: bool = False) -> Answers:
        """Ask every replica. With `silent`, replicas that only accepted the question suffice.

        Raises:
            ApiError: no replica has answered.
        """
        try:
            answers = await ask_all(self._replicas, scope)
        except Exception as error:
            raise error_of(error) from error
        if not (answers.by_name or (silent and answers.silent)):
            raise ApiError("no replica answers", status=503, code="replica_lost", headers={"Retry-After": "5"})
        return answers

    async def _answer(self, scope: Scope, plain: dict[str, Any], body: bytes, send: Send) -> None:
        """Forward a request: to the replica that stores its response, or else to any."""
        path = route_path(scope)
        need = need_of(path, body)
        secret = protocol_for(scope).secret(Headers(scope=scope)) or ""
        owner = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
        chain = prefix_chain(path, body, owner)
        avoid: set[str] = set()
        refusal: list[Message] = []
        for _ in range(ATTEMPTS):
            try:
                return await self._once(Hint(chain, frozenset(avoid), need.replica), plain, body, send)
            except _NotBegun as error:
                refusal = error.refusal
                if need.replica is not None and error.replica == need.replica:
                    break  # no other replica stores the response
                logger.info("replica %s did not begin to answer; trying another one", error.replica)
                if error.replica is not None:
                    avoid.add(error.replica)
        message = f"{ATTEMPTS} replicas ended before they began to answer"
        if need.replica is not None:
            message = f"the replica {need.replica!r}, which kept the response, has ended"
        return await _not_begun(refusal, message, need.field)(scope, _no_body, send)

    async def _once(self, hint: Hint, scope: dict[str, Any], body: bytes, send: Send) -> None:
        """Forward a request to one replica.

        Raises:
            _NotBegun: the replica did not answer, and nothing was sent.
            Exception: the replica failed within an answer that cannot report the failure.
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
                    del headers["X-Request-Id"]  # Serve's proxy adds it again
                else:
                    if not begun:
                        assert start is not None
                        if is_refusal(start, message):
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
                return await error_response(error_of(error), scope)(scope, _no_body, send)
            logger.warning("replica %s: %s while it was answering", name, type(error).__name__)
            if start is None or not _is_stream(start):
                raise  # breaks the connection, the only sign of an incomplete answer
            protocol = protocol_for(scope)
            written = event(protocol.error(error_of(error), None), protocol.error_event)
            await send({"type": "http.response.body", "body": written, "more_body": False})
        finally:
            with contextlib.suppress(Exception):
                outputs.cancel()


def _not_begun(refusal: list[Message], message: str, field: str | None) -> ASGIApp:
    """Return the answer if no replica began one: the last refusal or, without one, the message."""

    async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
        for part in refusal:
            await send(part)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(lost, scope)(scope, receive, send)

    lost = ApiError(message, status=503, param=field, code="replica_lost", headers={"Retry-After": "5"})
    return pass_on if refusal else refuse


def _refusal(answers: Answers) -> WholeAnswer | None:
    """Return the first answer with an error, such as a missing key."""
    return next((answer for answer in answers.by_name.values() if answer.status != 200), None)


async def _pass_on(answer: WholeAnswer, send: Send) -> None:
    """Send a replica's refusal."""
    start = {**answer.start, "type": "http.response.start"}
    del MutableHeaders(scope=start)["X-Request-Id"]  # Serve's proxy adds it again
    await send(start)
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


def _is_stream(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")


async def _each(outputs: AsyncIterator[list[Message]]) -> AsyncIterator[Message]:
    async for messages in outputs:
        for message in messages:
            yield message


async def _no_body() -> Message:
    return {"type": "http.disconnect"}


_ELSEWHERE = frozenset({"engine_busy", "engine_stopped", "draining"})
"""Codes of refusals that another replica might not give."""


def error_of(error: Exception) -> ApiError:
    """Return the client's error for an exception before or within an answer."""
    if isinstance(error, RayActorError):
        return ApiError("the replica that gave this answer has ended", status=503, code="replica_lost")
    if isinstance(error, BackPressureError):
        return ApiError(str(error), status=429, code="engine_busy", headers={"Retry-After": "1"})
    if isinstance(error, DeploymentUnavailableError):
        return ApiError("no replica can be started", status=503, code="replica_lost", headers={"Retry-After": "5"})
    logger.error("a request failed", exc_info=error)
    return described(error)


def is_refusal(start: Message, body: Message) -> bool:
    """Tell whether an answer is a refusal that another replica might not give."""
    if start["status"] not in (429, 503):
        return False
    try:
        return json.loads(body.get("body", b""))["error"]["code"] in _ELSEWHERE
    except (ValueError, KeyError, TypeError):
        return False
