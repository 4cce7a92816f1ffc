"""A replica's answers: what nobody takes is bounded, and ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray import serve
from renderings import tokenizer_with

import jpaged
from jpaged.integrations.ray import RayArguments
from jpaged.integrations.ray import replica as replica_module
from jpaged.integrations.ray.hints import REPLICA, Hint
from jpaged.integrations.ray.replica import MOST_UNREAD, Replica
from jpaged.server.caller import Caller
from jpaged.server.streaming import EventStream, event

SCOPE = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


class Chunks:
    """So many events, with their count and whether they came to an end."""

    def __init__(self, number):
        self.number = number
        self.told = 0
        self.closed = False

    async def __call__(self):
        try:
            for _ in range(self.number):
                self.told += 1
                yield event(self.told)
                await asyncio.sleep(0)
        finally:
            self.closed = True


class Alone(Replica):
    """A replica without an engine that would have to be shut down."""

    def __del__(self):
        pass


def replica_of(chunks, stall_timeout):
    """A replica whose app streams, without an engine."""

    async def app(scope, receive, send):
        await EventStream(b"data: 0\n\n", chunks(), Caller("r"), stall_timeout)(scope, receive, send)

    replica = Alone.__new__(Alone)
    replica._app, replica._name = app, "me"
    return replica


def bodies(messages):
    return [message["body"] for message in messages if message["type"] == "http.response.body"]


def test_a_replica_reads_answers_in_the_formats_of_its_models_template(tiny_llm, monkeypatch):
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", tokenizer_with("hermes").chat_template)
    monkeypatch.setattr(jpaged, "LLM", lambda model, **options: tiny_llm)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="me"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replica_module, "configure_logs", lambda level: None)

    async def formats(**server):
        replica = Replica(RayArguments(model="m", warmup=False, server=server))
        try:
            settings = replica._app.state.serving.settings
            return settings.tool_parser, settings.reasoning_parser
        finally:
            await replica.__del__()

    assert asyncio.run(formats()) == ("hermes", "hermes")
    assert asyncio.run(formats(tool_parser="none", reasoning_parser="think")) == (None, "think")


def test_an_answer_that_is_taken_comes_whole():
    async def main():
        chunks = Chunks(10 * MOST_UNREAD)
        found = [each async for some in replica_of(chunks, 60.0).answer(Hint(), SCOPE, b"") for each in some]
        assert found[0] == {"type": REPLICA, "name": "me"} and found[1]["type"] == "http.response.start"
        assert bodies(found) == [event(number) for number in range(chunks.number + 1)] + [b""]
        assert found[-1]["more_body"] is False

    asyncio.run(main())


def test_an_answer_that_nobody_takes_stays_small_and_is_given_up():
    async def main():
        chunks = Chunks(10**9)
        answer = replica_of(chunks, 0.1).answer(Hint(), SCOPE, b"")
        await anext(answer)
        taken = await anext(answer)
        async with asyncio.timeout(10):
            while not chunks.closed:
                await asyncio.sleep(0.01)
        assert chunks.told <= 2 * MOST_UNREAD
        with pytest.raises(TimeoutError, match="not read in time"):
            async for messages in answer:
                taken += messages
        assert len(taken) <= 2 * MOST_UNREAD and not any(message.get("more_body") is False for message in taken)

    asyncio.run(main())


def test_a_call_that_is_cancelled_ends_the_app():
    async def main():
        chunks = Chunks(10**9)
        answer = replica_of(chunks, 60.0).answer(Hint(), SCOPE, b"")
        await anext(answer)
        await anext(answer)
        await answer.aclose()
        assert chunks.closed

    asyncio.run(main())
