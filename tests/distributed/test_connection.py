"""Two ends of a connection in one process: messages, a clean end, and every way to be lost."""

from __future__ import annotations

import socket
import threading
import time
from queue import Queue

import pytest

from jpaged.distributed import connection
from jpaged.distributed.connection import Connection, read_frame, write_frame


class End:
    """A connection that keeps what it is told."""

    def __init__(self, peer: socket.socket) -> None:
        self.messages: Queue[bytes] = Queue()
        self.losses: Queue[str] = Queue()
        self.connection = Connection(peer, self.messages.put, self.losses.put)
        self.connection.start()


@pytest.fixture
def sockets(monkeypatch):
    monkeypatch.setattr(connection, "PING_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    with first, second:
        yield first, second


def test_messages_arrive_whole_and_in_order_and_pings_do_not_show(sockets):
    ends = [End(peer) for peer in sockets]
    sent = [bytes([i % 256]) * size for i, size in enumerate([1, 0, 3_000_000, 7, 1 << 16])]
    for message in sent:
        ends[0].connection.send(message)
        time.sleep(0.06)
    assert [ends[1].messages.get(timeout=10) for _ in range(4)] == [m for m in sent if m]
    assert ends[1].messages.empty() and ends[0].losses.empty() and ends[1].losses.empty()


def test_silence_shorter_than_the_limit_is_no_loss_as_long_as_there_are_pings(sockets):
    ends = [End(peer) for peer in sockets]
    time.sleep(0.05 * connection.MAX_SILENCES * 2)
    assert all(end.losses.empty() for end in ends)


def test_an_end_that_says_farewell_is_not_lost(sockets):
    here, there = (End(peer) for peer in sockets)
    here.connection.close(b"bye")
    assert there.messages.get(timeout=10) == b"bye"
    there.connection.close()
    time.sleep(0.2)
    assert here.losses.empty()


def test_an_end_that_dies_is_lost_once(sockets):
    here = End(sockets[0])
    sockets[1].close()
    assert here.losses.get(timeout=10) == "is gone (it closed the connection)"
    here.connection.send(b"into the void")
    time.sleep(0.1)
    assert here.losses.empty()


def test_an_end_that_falls_silent_is_lost(sockets):
    here = End(sockets[0])
    write_frame(sockets[1], b"alive", threading.Lock())
    assert here.messages.get(timeout=10) == b"alive"
    assert here.losses.get(timeout=10) == "has not been heard of for 0 seconds"


def test_a_strangers_first_message_cannot_be_of_any_length(sockets):
    sockets[1].sendall((1 << 40).to_bytes(8, "little"))
    with pytest.raises(ConnectionError, match=f"{1 << 40} bytes where at most 100"):
        read_frame(sockets[0], 3, 100)
