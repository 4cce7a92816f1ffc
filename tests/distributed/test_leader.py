"""What the leader tells its followers of a device call that fails in its own process only."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from jpaged.distributed import watch
from jpaged.distributed.follower import Follower
from jpaged.distributed.leader import Leader
from jpaged.distributed.watch import Watch
from jpaged.errors import ProcessLost
from jpaged.execution.worker import Worker


@pytest.fixture
def ends(monkeypatch):
    """A leader and its only follower."""
    monkeypatch.setattr(Watch, "_leave", lambda self: None)
    monkeypatch.setattr(watch, "NEWS_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        follower = Follower(server.accept()[0])
    leader = Leader({1: peer})
    yield leader, follower
    leader.close()


@pytest.fixture
def worker():
    """A worker whose device calls fail."""
    return object.__new__(Worker)


def test_a_device_call_that_fails_in_process_0_only_ends_the_run(ends, worker):
    leader, follower = ends
    leader.lead(SimpleNamespace(worker=worker))
    calls = []
    there = SimpleNamespace(make_call=lambda name, args: calls.append(name))
    with pytest.raises(AttributeError):
        worker.restart()
    with pytest.raises(ProcessLost, match="process 0 failed: AttributeError"):
        worker.restart()
    with pytest.raises(ProcessLost, match="process 0 failed: AttributeError"):
        follower.follow(SimpleNamespace(worker=there))
    assert calls in ([], ["restart"]), "what it was told once, and nothing behind it"


def test_a_device_call_that_fails_because_a_follower_did_says_so(ends, worker):
    leader, follower = ends
    leader.lead(SimpleNamespace(worker=worker))
    timer = threading.Timer(0.05, follower.fail, [MemoryError("full")])
    timer.start()
    with pytest.raises(ProcessLost, match=r"process 1 on 127.0.0.1 failed: MemoryError\('full'\)"):
        worker.restart()
    timer.join()
