"""The memory page's routes: files from here, a guarded stream of what changed, nobody's engine asked for nobody."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode

import numpy as np
import pytest
from fastapi import Depends, FastAPI, Header, HTTPException
from fastapi.testclient import TestClient
from scripted_engine import ScriptedEngine, busy_engine

from jpaged import MemoryMap
from jpaged.server.memory_page import MemoryFeed, memory_routes
from jpaged.server.memory_page.feed import FIELDS, map_message


def client_of(engine: ScriptedEngine, **options) -> TestClient:
    app = FastAPI()
    app.include_router(memory_routes(engine, **options))
    return TestClient(app)


class Mirror:
    """What a page knows of the pool after some messages."""

    def __init__(self) -> None:
        self.pages: np.ndarray | None = None
        self.blocks: list[np.ndarray] = []
        self.names: dict[str, str] = {}

    def take(self, text: str) -> dict:
        message = json.loads(text)
        if "pool" in message:
            number = message["pool"]["pages"]
            self.pages = np.full(number, -1)
            self.blocks = [np.zeros((number * g["perPage"], len(FIELDS)), int) for g in message["pool"]["groups"]]
            for blocks in self.blocks:
                blocks[:, FIELDS.index("request")] = blocks[:, FIELDS.index("sequence")] = -1
        pages = np.frombuffer(b64decode(message["pages"]), "<i4").reshape(-1, 2)
        self.pages[pages[:, 0]] = pages[:, 1]
        for blocks, packed in zip(self.blocks, message["blocks"], strict=True):
            rows = np.frombuffer(b64decode(packed), "<i4").reshape(-1, 1 + len(FIELDS))
            blocks[rows[:, 0]] = rows[:, 1:]
        self.names = message.get("names", self.names)
        return message

    def check(self, seen: MemoryMap) -> None:
        assert self.pages.tolist() == seen.page_groups.tolist()
        for blocks, group in zip(self.blocks, seen.groups, strict=True):
            for column, name in enumerate(FIELDS):
                assert blocks[:, column].tolist() == group.blocks[name].astype(np.int32).tolist(), name


def test_messages_carry_the_pool_and_then_what_changed():
    engine, mirror = busy_engine(), Mirror()
    before = engine.manager.map()
    whole = map_message(before, None)
    mirror.take(whole)
    mirror.check(before)
    for seq_id in (0, 2):
        engine.end(seq_id)
        engine.begin(10 + seq_id, [7] * 100)
        engine.step()
        now = engine.manager.map()
        part = map_message(now, before)
        mirror.take(part)
        mirror.check(now)
        assert len(part) < len(whole) / 2
        before = now
    assert len(map_message(engine.manager.map(), before)) < 120, "nothing changed"


def test_a_page_is_told_four_times_a_second_until_the_server_stops():
    engine, told = busy_engine(), []
    client = client_of(engine, stopping=lambda: engine.asked >= 3, rate=50)
    with client.stream("GET", "/memory/events") as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        for line in answer.iter_lines():
            if line:
                assert line.startswith("data: ")
                told.append(json.loads(line.removeprefix("data: ")))
    assert len(told) == 3 and engine.asked == 3
    assert ["pool" in message for message in told] == [True, False, False]
    assert told[0]["names"] == {"0": "alice-1", "2": "carol-1", "3": "dan-1", "5": "erin-1"}
    stats = told[0]["stats"]
    assert (stats["running"], stats["waiting"], stats["steps"]) == (5, 2, 24)
    assert stats["hits"] == engine.hits == 3 * 160
    assert stats["seconds"] < told[2]["stats"]["seconds"]


def test_the_pool_of_any_replica_is_told_and_of_no_other():
    engine = busy_engine()
    client = client_of(engine, replicas=2, stopping=lambda: engine.asked >= 1)
    answer = client.get("/memory/events", params={"replica": 1})
    assert answer.headers["X-Replicas"] == "2" and engine.replica == 1 and '"pool"' in answer.text
    for number in (2, -1):
        assert client.get("/memory/events", params={"replica": number}).status_code == 404


def test_the_stream_ends_with_the_engine():
    engine = busy_engine()
    engine.stopped = True
    assert client_of(engine).get("/memory/events").text == ""


def test_the_stream_needs_what_its_dependencies_ask_and_the_files_do_not():
    def admin(authorization: str = Header("")) -> None:
        if authorization != "Bearer secret":
            raise HTTPException(401)

    engine = busy_engine()
    client = client_of(engine, dependencies=[Depends(admin)], stopping=lambda: engine.asked >= 1)
    assert [client.get(path).status_code for path in ("/memory", "/memory/page.js")] == [200, 200]
    assert client.get("/memory/events").status_code == 401
    assert engine.asked == 0
    assert client.get("/memory/events", headers={"Authorization": "Bearer secret"}).text.startswith("data: {")


def test_the_page_loads_its_own_script_and_nothing_from_another_host():
    client = client_of(busy_engine())
    page, script = client.get("/memory"), client.get("/memory/page.js")
    assert page.headers["content-type"].startswith("text/html")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    for text in (page.text, script.text):
        assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text)
    assert re.findall(r'src="([^"]*)"', page.text) == ["memory/page.js"]


def test_every_control_of_the_page_has_a_name_and_tables_have_headings():
    page = client_of(busy_engine()).get("/memory").text
    assert '<html lang="en">' in page and 'role="status"' in page and 'aria-live="polite"' in page
    for canvas in re.findall(r"<canvas[^>]*>", page, re.S):
        assert 'tabindex="0"' in canvas and "aria-label=" in canvas
    for control in re.findall(r"<input[^>]*>", page):
        assert re.search(r"<label>[^<]*" + re.escape(control), page), control
    assert page.count("<th ") == page.count('<th scope="col"')
    scrolled = re.findall(r'<div class="scroll" tabindex="0" role="region" aria-label(?:ledby)?="[^"]+"><table', page)
    assert len(scrolled) == page.count("<table") == 3, "the keyboard scrolls every table too"


def test_a_rate_that_no_page_could_follow_is_refused():
    with pytest.raises(ValueError, match=r"rate=0 messages a second is not in \(0, 60\]"):
        memory_routes(busy_engine(), rate=0)


def test_ten_pages_cost_the_engine_no_more_than_one():
    engine = busy_engine()

    async def watch(feed: MemoryFeed) -> list[str]:
        messages = feed.messages()
        told = [await anext(messages) for _ in range(3)]
        await messages.aclose()
        return told

    async def all_watch() -> list[list[str]]:
        feed = MemoryFeed(engine, interval=0.6)  # far longer than a busy machine lets one page wait for another
        return await asyncio.gather(*(watch(feed) for _ in range(10)))

    told = asyncio.run(all_watch())
    assert len({json.dumps(each) for each in told}) == 1
    assert engine.asked == 3


def test_nobody_asks_the_engine_when_nobody_watches():
    async def leave() -> int:
        engine = busy_engine()
        messages = MemoryFeed(engine, interval=0.01).messages()
        await anext(messages)
        await messages.aclose()
        before = engine.asked
        await asyncio.sleep(0.1)
        return engine.asked - before

    assert asyncio.run(leave()) == 0


def test_while_a_step_is_long_a_page_gets_the_gauges_without_a_new_map(monkeypatch):
    monkeypatch.setattr("jpaged.server.memory_page.feed.LONGEST_WAIT", 0.05)

    async def watch() -> list[dict]:
        engine = busy_engine()
        messages = MemoryFeed(engine, interval=0.01).messages()
        told = [json.loads(await anext(messages))]
        engine.hold = asyncio.Event()
        engine.waiting = 9
        told.append(json.loads(await anext(messages)))
        engine.step()
        engine.hold.set()
        told.append(json.loads(await anext(messages)))
        await messages.aclose()
        return told

    first, late, last = asyncio.run(watch())
    assert [message["late"] for message in (first, late, last)] == [False, True, False]
    assert late["stats"]["waiting"] == 9 and late["blocks"] == ["", ""]
    assert last["blocks"][0]


def test_a_slow_reader_is_told_of_all_that_changed_meanwhile():
    async def watch() -> None:
        engine, slow = busy_engine(), Mirror()
        feed = MemoryFeed(engine, interval=0.001)
        messages, others = feed.messages(), feed.messages()
        slow.take(await anext(messages))
        for _ in range(5):
            engine.step()
            await anext(others)
            await asyncio.sleep(0.002)
        slow.take(await anext(messages))
        slow.check(engine.manager.map())
        await messages.aclose()
        await others.aclose()

    asyncio.run(watch())


def test_a_page_that_reads_nothing_is_let_go():
    app, sent = FastAPI(), []
    app.include_router(memory_routes(busy_engine(), rate=60, stall_timeout=0.05))

    async def send(message):
        sent.append(message)
        if len(sent) == 4:  # its buffers are full
            await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    async def main():
        scope = {"type": "http", "method": "GET", "path": "/memory/events", "query_string": b"", "headers": []}
        await asyncio.wait_for(app(scope, receive, send), 20)

    asyncio.run(main())
    assert len(sent) == 4 and sent[0]["status"] == 200
