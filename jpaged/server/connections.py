"""HTTP connections with limits that uvicorn lacks.

uvicorn bounds neither the bytes of a request's head nor the time that a request takes to arrive, and it waits forever
for a client that does not read its whole answer.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_HEAD_BYTES = 64 * 2**10
"""Limit on the bytes of a request's line and headers."""

ABORT = "jpaged.abort"
"""ASGI extension: a function that closes the connection at once, with unread data or without."""


class Connection(HttpToolsProtocol):
    """One connection.

    A request has to arrive, head and body, within `arrival_timeout` seconds; an idle connection is closed after as
    long. An ended answer is cut off if the client reads nothing of it for `timeout_keep_alive` seconds.
    """

    arrival_timeout = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes: int | None = 0  # of the current head; None within a request's body
        self._unread = 0
        self._arrival: asyncio.TimerHandle | None = None
        self._unanswered: deque[RequestResponseCycle] = deque()

    # ------------------------------------------------------------------ receiving

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request that its client is gone: uvicorn tells the newest, and the others would write."""
        self._stop_waiting()
        super().connection_lost(exc)
        self.pipeline.clear()
        while self._unanswered:
            cycle = self._unanswered.popleft()
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse data, unless the head has grown too long."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_request()

    def on_headers_complete(self) -> None:
        """Pass a request on to the app.

        Raises:
            ValueError: the head is too long; the parser then calls `send_400_response`.
        """
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEAD_BYTES:
            self._head_bytes = MOST_HEAD_BYTES + 1
            raise ValueError("the head is too long")
        self._head_bytes = None  # the rest of this piece is body
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]
        super().on_headers_complete()
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        self._stop_waiting()
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, in the shape of all other errors."""
        if self._head_bytes is not None and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(b"400 Bad Request", msg)

    # ------------------------------------------------------------------ timeouts

    def _await_request(self) -> None:
        self._stop_waiting()
        self._arrival = self.loop.call_later(self.arrival_timeout, self._time_out)

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _time_out(self) -> None:
        """End a request that has not arrived in time. Waiting for the previous answer does not count."""
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (answering and not self.cycle.more_body):
            self._await_request()
        elif answering and self.cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(b"408 Request Timeout", f"the request did not arrive within {self.arrival_timeout:g} s")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. A client that still reads an answer gets more time; one that stopped is cut off."""
        unread = self.transport.get_write_buffer_size()
        if not unread or self.transport.is_closing():
            super().timeout_keep_alive_handler()
        elif unread == self._unread:
            self.transport.abort()
        else:
            self._unread = unread
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # ------------------------------------------------------------------ refusing

    def _refuse_head(self) -> None:
        message = f"the head of a request has more than {MOST_HEAD_BYTES} bytes"
        self._refuse(b"431 Request Header Fields Too Large", message)

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer before the app has the request, and close the connection."""
        self._stop_waiting()
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        content = json.dumps(body).encode()
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        self.transport.write(head % (status, len(content)) + content)
        self.transport.close()


def connections(timeout: float) -> type[Connection]:
    """Return a protocol class whose requests have to arrive within `timeout` seconds."""

    class Patient(Connection):
        """A connection of one server."""

    Patient.arrival_timeout = timeout
    return Patient
