"""A follower makes the leader's device calls, and nothing else that a message may name."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace

import pytest

from jpaged.distributed.connection import Connection
from jpaged.distributed.follower import Follower
from jpaged.execution.wire import encode
from jpaged.execution.worker import DEVICE_CALLS, Worker


@pytest.fixture
def told(monkeypatch):
    """Runs a follower on messages; returns the device calls it made."""

    def run(*messages):
        calls = []
        for name in DEVICE_CALLS:
            monkeypatch.setattr(Worker, name, lambda self, *args, name=name: calls.append((name, args)))
        with socket.create_server(("127.0.0.1", 0)) as server:
            leader = Connection(socket.create_connection(server.getsockname()), lambda _: None, lambda _: None)
            follower = Follower(server.accept()[0])
        leader.start()
        for name, args in messages:
            leader.send(encode(name, args))
        leader.close(encode("end", ()))  # a follower that loses its leader would end the process
        with pytest.raises(SystemExit):
            follower.follow(SimpleNamespace(worker=object.__new__(Worker)))
        return calls

    return run


def test_every_declared_call_is_made_in_the_order_told(told):
    messages = [(name, (i, name)) for i, name in enumerate(sorted(DEVICE_CALLS))]
    assert {"work", "compute", "score", "draw"} <= DEVICE_CALLS
    assert told(*messages) == messages


@pytest.mark.parametrize("name", ["update_params", "make_call", "__init__", "pool", "announce", "nonsense"])
def test_anything_else_is_refused_by_name(told, name):
    declared = re.escape(str(sorted(DEVICE_CALLS)))
    with pytest.raises(ValueError, match=f"'{name}' is no device call; a worker's are {declared}"):
        told((name, ()))
