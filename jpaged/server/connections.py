"""HTTP connections with limits on what a client may send and leave unread, on top of uvicorn's.

uvicorn bounds neither the bytes of a request's head nor the time that a request may take to arrive, and waits for ever
for a client that does not read a whole answer.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 * 2**10
"""Most bytes of a request's line and headers."""

ABORT = "jpaged.abort"
"""An extension of ASGI: a function that ends the connection at once, whatever its client has not read yet."""


class Connection(HttpToolsProtocol):
    """One connection.

    A request has to be there, head and body, within `patience` seconds; a connection that sends none is closed after as
    long. An answer of which the client takes nothing for `timeout_keep_alive` seconds after its end is cut off.
    """

    patience = 30.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes: int | None = 0  # of the head that is being read; None between a head and its request's end
        self._unread = 0
        self._arrival: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ what comes

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in what came, unless a head has grown too long."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_request()

    def on_headers_complete(self) -> None:
        """Hand a request on to the app.

        Raises:
            ValueError: its head is too long; the parser turns this into a call of `send_400_response`.
        """
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEAD_BYTES:
            self._head_bytes = MOST_HEAD_BYTES + 1
            raise ValueError("the head is too long")
        self._head_bytes = None  # what came in the same piece is body
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_waiting()
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the shape of all other errors."""
        if self._head_bytes is not None and self._head_bytes > MOST_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(b"400 Bad Request", msg)

    # ------------------------------------------------------------------ what does not come

    def _await_request(self) -> None:
        self._stop_waiting()
        self._arrival = self.loop.call_later(self.patience, self._give_up)

    def _stop_waiting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _give_up(self) -> None:
        """End a request that is not there yet. One that waits behind another's answer is not late."""
        if self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (answering and not self.cycle.more_body):
            self._await_request()
        elif answering and self.cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(b"408 Request Timeout", f"the request was not there within {self.patience:g} s")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. One whose client goes on reading an answer gets more time, one whose client does
        not is cut off."""
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

    # ------------------------------------------------------------------ what is said

    def _refuse_head(self) -> None:
        message = f"the head of a request has more than {MOST_HEAD_BYTES} bytes"
        self._refuse(b"431 Request Header Fields Too Large", message)

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer for the app, which has not got the request, and close the connection."""
        self._stop_waiting()
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        content = json.dumps(body).encode()
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        self.transport.write(head % (status, len(content)) + content)
        self.transport.close()


def connections(patience: float) -> type[Connection]:
    """Return the protocol of connections whose requests have to be there within so many seconds."""

    class Patient(Connection):
        """A connection of one server."""

    Patient.patience = patience
    return Patient
