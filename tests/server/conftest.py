"""One tiny model behind a real server, which all tests of this folder ask over a socket."""

import pytest
from live_server import LiveServer, Pace
from served_model import tiny_folder, tiny_llm

from jpaged import AsyncLLM
from jpaged.server.settings import ServerSettings

__all__ = ["tiny_folder", "tiny_llm"]


@pytest.fixture
def pace(monkeypatch):
    """Holds the engine between two steps, so that what a test asks meanwhile comes at no time of its own."""
    return Pace(monkeypatch)


@pytest.fixture
def serve(tiny_llm, pace):
    """Starts servers over the one engine, one at a time, and ends them."""
    running = []

    def start(max_waiting=256, **settings):
        engine = AsyncLLM.from_llm(tiny_llm, max_waiting_requests=max_waiting)
        server = LiveServer(engine, ServerSettings(model="tiny", port=0, max_waiting=max_waiting, **settings))
        running.append(server)
        return server

    yield start
    pace.go_on()
    for server in running:
        server.stop()
    engine = tiny_llm.control.engine
    engine.prefixes.drop_breakpoints(engine.replicas[0])
    assert engine.memory.num_used_blocks == 0
    assert not engine.has_work


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture
def server_after(serve):
    """Starts the server when the test has done with the engine itself."""
    return serve
