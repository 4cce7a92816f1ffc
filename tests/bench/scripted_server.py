"""A small OpenAI-compatible server without a model, on a port of its own, that answers at the times it is told to."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse


@dataclass
class Script:
    """How the server answers.

    Attributes:
        first, gap: seconds to the first token and between tokens.
        part: the field of a chat's delta that holds the text.
        usage: whether it counts tokens at the end.
        refuse: of every so many requests, one gets 429; 0 = none.
        break_off: whether streams end without [DONE].
        fail: whether streams hold an error.
        strange: whether they hold what no stream of OpenAI's has.
        bodies: what was asked, in order.
        keys: the Authorization headers that came.
        open, most_open: requests that are being answered, and the most there were at once.
    """

    first: float = 0.03
    gap: float = 0.01
    part: str = "content"
    usage: bool = True
    refuse: int = 0
    break_off: bool = False
    fail: bool = False
    strange: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.first)
            for number in range(body["max_tokens"]):
                if number:
                    await asyncio.sleep(self.gap)
                chat = {"delta": {self.part: "a "}} if "messages" in body else {"text": "a "}
                yield f"data: {json.dumps({'choices': [chat]})}\n\n"
                if self.strange:
                    yield f"data: {json.dumps({'choices': [None, {'delta': 4}], 'usage': 5})}\n\ndata: 3\n\n"
                if self.fail:
                    yield f"data: {json.dumps({'error': {'message': 'the device is gone'}})}\n\n"
                    return
            if self.usage:
                words = len(json.dumps(body.get("prompt", "")).split())
                counts = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}
                yield f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n"
            if not self.break_off:
                yield "data: [DONE]\n\n"
        finally:
            self.open -= 1


@contextmanager
def scripted_server(script: Script) -> Iterator[str]:
    """Serve until the block ends; yields the URL."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "scripted"}]}

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> Any:
        body = await request.json()
        script.bodies.append(body)
        script.keys.append(request.headers.get("authorization", ""))
        if script.refuse and len(script.bodies) % script.refuse == 0:
            return JSONResponse({"error": {"message": "too many requests"}}, 429)
        return StreamingResponse(script.events(body), media_type="text/event-stream")

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
