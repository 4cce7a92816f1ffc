"""Server-sent events, whole answers, and the handling of clients that disconnect or stop reading."""

from __future__ import annotations

import asyncio
import json
import logging
import typing
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jpaged.server.caller import Caller
from jpaged.server.connections import ABORT
from jpaged.server.errors import CLIENT_GONE, ClientGone, described
from jpaged.server.protocol import Protocol
from jpaged.server.protocols import protocol_for

logger = logging.getLogger(__name__)
T = TypeVar("T")
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events with stream=true.", "content": {"text/event-stream": {}}}
}
"""The answer of a path that may stream, for the OpenAPI document."""
DONE = b"data: [DONE]\n\n"
_LINE_ENDS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"]


def _json(data: Any) -> bytes:
    """Return JSON. Lone surrogates are escaped: an answer may repeat those that a client sent."""
    try:
        return to_json(data, inf_nan_mode="null")
    except PydanticSerializationError:
        return json.dumps(data).encode()


def _line(data: Any) -> bytes:
    """Return JSON without the characters at which some clients split lines: U+0085, U+2028 and U+2029 are escaped."""
    written = _json(data)
    if not written.isascii():
        for character, escape in _LINE_ENDS:
            written = written.replace(character, escape)
    return written


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event with JSON data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _line(data) + b"\n\n"


class Events:
    """Writes the events of one answer, whose data begin with the same fields, encoded once.

    Args:
        head: the common fields.
    """

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._start = b"data: " + _line(dict(head))[:-1] + b","

    def __call__(self, fields: Mapping[str, Any]) -> bytes:
        """Return an event with at least one field after the head's."""
        return self._start + _line(fields)[1:] + b"\n\n"


def whole(data: Any) -> Response:
    """Return a whole answer."""
    return Response(_json(data), media_type="application/json")


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, caller: Caller, work: Coroutine[Any, Any, T]) -> T:
    """Run some work; cancel it if the client disconnects or the deadline passes.

    Raises:
        ClientGone: the client closed its connection.
        TimeoutError: the request's deadline passed.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request.receive))
    try:
        async with asyncio.timeout_at(caller.deadline):
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    if task.cancelled():
        raise ClientGone
    return task.result()


class Answer(typing.Protocol):
    """An answer that a protocol renders, of which one of its methods is called, once."""

    async def whole(self) -> Mapping[str, Any]:
        """Return its JSON."""
        ...

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield it as server-sent events."""
        ...


async def answered(
    request: Request, caller: Caller, answer: Answer, *, streamed: bool, stall_timeout: float
) -> Response:
    """Return an answer as a stream or whole, as the client asked."""
    if streamed:
        return await stream(request, caller, answer.chunks(), stall_timeout)
    return whole(await while_connected(request, caller, answer.whole()))


async def stream(
    request: Request, caller: Caller, chunks: AsyncGenerator[bytes, None], stall_timeout: float
) -> EventStream:
    """Wait until the engine has taken the request, so that a refusal gets its own status, and return the answer.

    The first chunk may be long in coming: the stream's head does not wait for it.
    """
    first = asyncio.ensure_future(_first(chunks))
    try:
        await while_connected(request, caller, _begun(first, caller.taken))
        if first.done():
            first.result()
    except BaseException:
        await _cancelled(first)
        await chunks.aclose()
        raise
    return EventStream(first, chunks, caller, stall_timeout)


async def _first(chunks: AsyncGenerator[bytes, None]) -> bytes | None:
    """Return the first chunk; None if there is none."""
    async for chunk in chunks:
        return chunk
    return None


async def _begun(first: asyncio.Future[bytes | None], taken: asyncio.Event) -> None:
    """Wait for a stream's first chunk, or until the engine has taken the request."""
    waiting = asyncio.ensure_future(taken.wait())
    try:
        await asyncio.wait((first, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait for its end."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))


class EventStream(Response):
    """Sends chunks as they come. It ends when the client disconnects or stops reading, or the deadline passes.

    After each `ping_interval` seconds of silence, see `Caller`, a ping shows the client that the stream lives.

    Args:
        first, chunks: encoded server-sent events. `first` may be awaited yet, and is None if `chunks` yields all.
        caller: the caller of the request.
        stall_timeout: limit on the seconds that sending a chunk may take.
        headers: further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[bytes | None] | bytes | None,
        chunks: AsyncGenerator[bytes, None],
        caller: Caller,
        stall_timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._first = first
        self._chunks = chunks
        self._caller = caller
        self._stall_timeout = stall_timeout
        self._sending: float | None = None  # start of sending the current chunk
        self._sent = 0.0  # time of the last one
        self._turn = asyncio.Lock()  # of a ping and a chunk that come at once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        protocol = protocol_for(scope)
        task, watch = asyncio.ensure_future(self._send(send, protocol)), asyncio.ensure_future(disconnected(receive))
        stalled = asyncio.ensure_future(self._stalled())
        pings = asyncio.ensure_future(self._ping(send, protocol))
        try:
            await asyncio.wait((task, watch, stalled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            pings.cancel()
            gave_up = not stalled.cancel() and not task.done()
            if not task.done():
                self._caller.log["status"] = CLIENT_GONE
                await _cancelled(task)
            if isinstance(self._first, asyncio.Future):  # the task may not have begun
                await _cancelled(self._first)
        if gave_up:
            self._caller.log["error"] = "the client stopped reading"
            # Closing would wait until the client has read everything.
            scope.get("extensions", {}).get(ABORT, lambda: None)()
            await asyncio.sleep(0)  # let uvicorn notice
        elif not task.cancelled():
            task.result()

    async def _stalled(self) -> None:
        """Return when sending a chunk takes longer than `stall_timeout` seconds.

        One timer watches the stream: a timer for each chunk would cost more than the chunk.
        """
        clock = asyncio.get_running_loop().time
        left = self._stall_timeout
        while left > 0:
            await asyncio.sleep(left)
            left = self._stall_timeout - (0.0 if self._sending is None else clock() - self._sending)

    async def _body(self, send: Send, chunk: bytes, *, more: bool = True) -> None:
        async with self._turn:
            self._sent = self._sending = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
            self._sending = None

    async def _ping(self, send: Send, protocol: Protocol) -> None:
        """Send a ping after each interval of silence."""
        interval, clock = self._caller.ping_interval, asyncio.get_running_loop().time
        if interval is None:
            return
        self._sent = clock()
        while True:
            if (left := self._sent + interval - clock()) > 0:
                await asyncio.sleep(left)
            elif self._sending is not None:  # a chunk waits for its reader
                await asyncio.sleep(interval)
            else:
                await self._body(send, protocol.ping)

    async def _send(self, send: Send, protocol: Protocol) -> None:
        """Send all chunks."""
        body = partial(self._body, send)
        async with aclosing(self._chunks) as chunks:
            try:
                async with asyncio.timeout_at(self._caller.deadline):
                    first = await self._first if isinstance(self._first, asyncio.Future) else self._first
                    if first is not None:
                        await body(first)
                    async for chunk in chunks:
                        await body(chunk)
            except Exception as error:  # the status is sent already, so the error becomes an event
                answer = described(error)
                if answer.status == 500:
                    logger.exception("a stream failed", extra={"request_id": self._caller.request_id})
                self._caller.log["error"] = answer.code  # a message may repeat the prompt
                await body(event(protocol.error(answer, self._caller.request_id), protocol.error_event))
        await body(b"", more=False)
