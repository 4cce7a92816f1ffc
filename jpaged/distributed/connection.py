"""Carries whole messages between two processes over TCP, and makes certain that the other one lives."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable

PING_SECONDS = 5.0
"""Interval at which a process says that it lives."""

MAX_SILENCES = 6
"""Waits of `PING_SECONDS` in a row without a byte after which the other process counts as dead. Waits are counted,
not seconds, so that a process that was itself suspended does not blame the others."""

_LENGTH_BYTES = 8


class Connection:
    """Holds one end of a conversation: one thread reads, and one says every few seconds that this process lives.

    Args:
        on_message: called in the reading thread for each message.
        on_loss: called there once, with what happened, when the other end is gone, unless this one was closed first.
    """

    def __init__(
        self, peer: socket.socket, on_message: Callable[[bytes], None], on_loss: Callable[[str], None]
    ) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.settimeout(None)
        self._socket = peer
        self._on_message, self._on_loss = on_message, on_loss
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to listen."""
        for target in (self._read, self._ping):
            threading.Thread(target=target, name="jpaged-connection", daemon=True).start()

    def send(self, message: bytes) -> None:
        """Send a message. If the other process is gone nothing happens here: `on_loss` tells."""
        try:
            write_frame(self._socket, message, self._sending)
        except OSError:
            self._hang_up()

    def close(self, farewell: bytes = b"") -> None:
        """End the conversation with a last message; messages sent before still arrive."""
        self._closed.set()
        self.send(farewell)
        self._hang_up(socket.SHUT_WR)

    def _ping(self) -> None:
        while not self._closed.wait(PING_SECONDS):
            self.send(b"")

    def _read(self) -> None:
        try:
            while True:
                message = read_frame(self._socket, MAX_SILENCES)
                if message:
                    self._on_message(message)
        except TimeoutError:
            loss = f"has not been heard of for {PING_SECONDS * MAX_SILENCES:.0f} seconds"
        except OSError as error:
            loss = f"is gone ({error})"
        self._hang_up()
        if not self._closed.is_set():
            self._closed.set()
            self._on_loss(loss)

    def _hang_up(self, how: int = socket.SHUT_RDWR) -> None:
        try:
            self._socket.shutdown(how)
        except OSError:  # it was already
            return


def write_frame(peer: socket.socket, message: bytes, lock: threading.Lock) -> None:
    """Send a message after its length; a ping is one of length 0."""
    with lock:
        peer.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)


def read_frame(peer: socket.socket, max_silences: int, max_bytes: int | None = None) -> bytes:
    """Receive the next message; a ping is empty.

    Raises:
        TimeoutError: no byte came in `max_silences` waits of `PING_SECONDS`.
        ConnectionError: the other end hung up, or announces more than `max_bytes`.
    """
    length = int.from_bytes(_read_bytes(peer, _LENGTH_BYTES, max_silences), "little")
    if max_bytes is not None and length > max_bytes:
        raise ConnectionError(f"a message of {length} bytes where at most {max_bytes} are expected")
    return _read_bytes(peer, length, max_silences)


def _read_bytes(peer: socket.socket, count: int, max_silences: int) -> bytes:
    parts = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(peer, selectors.EVENT_READ)
        while len(parts) < count:
            for _ in range(max_silences):
                if selector.select(PING_SECONDS):
                    break
            else:
                raise TimeoutError
            part = peer.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise ConnectionError("it closed the connection")
            parts += part
    return bytes(parts)
