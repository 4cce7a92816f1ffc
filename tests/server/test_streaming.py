"""A stream ends when nobody reads it, and tells what went wrong while it still can."""

import asyncio
import json
from types import SimpleNamespace

import httpx
import openai
import pytest

from jpaged import EngineStopped
from jpaged.bench.client import Target, ask_one
from jpaged.bench.load import Ask
from jpaged.server.caller import Caller
from jpaged.server.errors import ApiError, ClientGone
from jpaged.server.streaming import Events, EventStream, event, stream


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


# ---------------------------------------------------------------------- silence


class Quiet:
    """Chunks that come once a number of pings went out, or never."""

    def __init__(self, connection, pings):
        self.connection, self.pings = connection, pings

    async def __call__(self):
        for i in range(2):
            while sum(b"ping" in one.get("body", b"") for one in self.connection.sent) < self.pings * (i + 1):
                await asyncio.sleep(0)
            yield event(i)


def quiet(path, *, pings, interval=0.001):
    connection = Connection()

    async def main():
        caller = Caller("r1", ping_interval=interval)
        answer = EventStream(None, Quiet(connection, pings)(), caller, 60.0)
        await answer({"path": path}, connection.receive, connection.send)

    asyncio.run(asyncio.wait_for(main(), 10))
    return b"".join(one.get("body", b"") for one in connection.sent)


def test_silence_has_pings_in_each_protocols_form_and_ends_with_the_next_chunk():
    for path, ping in (
        ("/v1/chat/completions", b": ping\n\n"),
        ("/v1/responses", b": ping\n\n"),
        ("/v1/messages", b'event: ping\ndata: {"type":"ping"}\n\n'),
    ):
        sent = quiet(path, pings=2)
        assert sent.count(ping) >= 4 and sent.replace(ping, b"") == event(0) + event(1)
        assert sent.startswith(ping * 2)


def test_a_stream_that_is_never_silent_has_no_ping():
    assert quiet("/", pings=0, interval=60.0) == event(0) + event(1)


def begun(chunks, *, taken=True, gone=False):
    """Return what `stream` makes of chunks: the response, and how the caller was taken meanwhile."""

    async def main():
        caller = Caller("r1")
        request = SimpleNamespace(receive=Connection().receive)
        if gone:
            request.receive = no_client
        waiting = asyncio.ensure_future(stream(request, caller, chunks, 60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done() or gone or isinstance(waiting.exception(), ApiError)
        if taken:
            caller.take()
        answer = await waiting
        connection = Connection()
        sending = asyncio.ensure_future(answer({"path": "/"}, connection.receive, connection.send))
        for _ in range(5):
            await asyncio.sleep(0)
        assert [one["type"] for one in connection.sent] == ["http.response.start"]
        sending.cancel()
        await asyncio.wait((sending,))

    asyncio.run(asyncio.wait_for(main(), 10))


async def no_client():
    return {"type": "http.disconnect"}


class Waiting:
    """Chunks of which the first never comes."""

    def __init__(self, error=None):
        self.error = error
        self.closed = False

    async def __call__(self):
        try:
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
            yield b""
        finally:
            self.closed = True


def test_the_head_goes_out_when_the_engine_takes_the_request():
    chunks = Waiting()
    begun(chunks())
    assert chunks.closed


def test_what_is_refused_before_that_has_its_own_status():
    chunks = Waiting(ApiError("no", status=429))
    with pytest.raises(ApiError):
        begun(chunks(), taken=False)
    assert chunks.closed


def test_a_client_that_leaves_before_that_ends_the_request():
    chunks = Waiting()
    with pytest.raises(ClientGone):
        begun(chunks(), taken=False, gone=True)
    assert chunks.closed


STREAMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6},
    "/v1/completions": {"prompt": ["hi", "you"], "max_tokens": 6},
    "/v1/responses": {"input": "hi", "max_output_tokens": 6},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6},
}


def test_a_stream_begins_while_the_engine_makes_no_step(serve, pace):
    server = serve(ping_interval=0.005)
    for path, body in STREAMS.items():
        pace.left = 0
        with server.http.stream("POST", path, json={"model": "tiny", "stream": True} | body) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line)
            assert "ping" in next(lines)
            pace.go_on()
            rest = list(lines)
        assert sum(line.startswith("data: ") for line in rest) > 2, rest
    pace.left = 0
    too_much = STREAMS["/v1/completions"] | {"stream": True, "max_tokens": 0}
    assert server.refusal("/v1/completions", {"model": "tiny"} | too_much)["param"] == "max_tokens"
    pace.go_on()


def test_clients_pass_over_pings(serve, pace):
    server = serve(ping_interval=0.001)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
    want = client.chat.completions.create(**asked).choices[0].message.content
    pace.least = 0.02
    found = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(found) == want
    same = {"model": "tiny", "input": "hi", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**same).output_text
    streamed = client.responses.create(**same, stream=True, background=True)
    ids, text = [], ""
    for made in streamed:
        ids.append(made.response.id if made.type == "response.created" else ids[0])
        text += made.delta if made.type == "response.output_text.delta" else ""
    assert text == whole
    again = client.responses.retrieve(ids[0], stream=True, starting_after=1)
    assert [made.sequence_number for made in again] == list(range(2, len(ids)))

    async def measured():
        target = Target(server.url, "tiny", endpoint="completions", extra={"ignore_eos": True})
        async with httpx.AsyncClient(timeout=60) as http:
            return await ask_one(http, target, Ask("hi", 8), 0.0)

    answer = asyncio.run(measured())
    assert answer.error is None and answer.output_tokens == 8
