"""A stream ends when nobody reads it, and tells what went wrong while it still can."""

import asyncio
import json

from jpaged import EngineStopped
from jpaged.server.caller import Caller
from jpaged.server.streaming import Events, EventStream, event


class Connection:
    """The server's end of a connection: its reader takes `room` chunks, and never goes away."""

    def __init__(self, room=10**6):
        self.room = room
        self.sent = []

    async def receive(self):
        await asyncio.Event().wait()

    async def send(self, message):
        if message["type"] == "http.response.body" and len(self.sent) >= self.room:
            await asyncio.Event().wait()
        self.sent.append(message)


class Chunks:
    """Numbers without end, or until something happens."""

    def __init__(self, error=None):
        self.error = error
        self.closed = False

    async def __call__(self):
        try:
            for i in range(10**6):
                if i == 3 and self.error is not None:
                    raise self.error
                yield event(i)
                await asyncio.sleep(0)
        finally:
            self.closed = True


def answer(chunks, connection, *, stall=0.05, deadline=None):
    async def main():
        caller = Caller("r1")
        if deadline is not None:
            caller.deadline = asyncio.get_running_loop().time() + deadline
        await EventStream(b"first", chunks(), caller, stall)({"path": "/"}, connection.receive, connection.send)
        return caller

    return asyncio.run(asyncio.wait_for(main(), 10))


def test_neither_a_browser_nor_a_proxy_is_to_keep_a_stream():
    connection = Connection()
    answer(Chunks(EngineStopped("no more")), connection)
    headers = dict(connection.sent[0]["headers"])
    assert (headers[b"cache-control"], headers[b"x-accel-buffering"]) == (b"no-cache", b"no")


def test_a_reader_that_reads_nothing_is_let_go():
    chunks, connection = Chunks(), Connection(room=5)
    caller = answer(chunks, connection)
    assert chunks.closed and len(connection.sent) == 5
    assert caller.log == {"status": 499, "error": "the client stopped reading"}


def test_an_engine_that_ends_is_told_of_in_the_stream():
    chunks, connection = Chunks(EngineStopped("the engine's loop failed")), Connection()
    answer(chunks, connection)
    assert json.loads(connection.sent[-2]["body"].removeprefix(b"data: "))["error"]["code"] == "engine_stopped"
    assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_the_deadline_ends_a_stream_that_is_read():
    chunks, connection = Chunks(), Connection()
    answer(chunks, connection, deadline=0.05)
    assert b"request_timeout" in connection.sent[-2]["body"] and chunks.closed


def test_an_error_that_nobody_foresaw_tells_nothing_of_itself():
    connection = Connection()
    caller = answer(Chunks(KeyError("secret")), connection)
    assert caller.log == {"error": "internal_error"}
    assert b"secret" not in connection.sent[-2]["body"] and b"internal_error" in connection.sent[-2]["body"]


def test_characters_at_which_clients_split_lines_are_escaped():
    text = "a\x85b\u2028c\u2029d\u00e9"
    written = event({"text": text})
    assert len(written.decode().splitlines()) == 2 and json.loads(written[6:]) == {"text": text}
    assert len(Events({"head": text})({"text": text}).decode().splitlines()) == 2
