"""A server on a port of this machine, in a thread beside the test."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import httpx

from jpaged import LLM
from jpaged.engine.engine import Engine
from jpaged.server.app import create_app
from jpaged.server.process import Server, uvicorn_config

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
SECONDS = 120
"""For what takes moments: nothing may hang, and a machine with ten times its work to do may take half a minute."""


def process_env(**variables):
    """The environment of a process that runs this checkout's jpaged, and no other one that is installed."""
    paths = [CHECKOUT, HERE, HERE.parent / "engine", HERE.parent / "models"]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | variables


def make_llm(folder):
    """The engine of all tests: its pool holds a few long requests."""
    return LLM(folder, kv_cache_memory_bytes=2**23, **SETTINGS)


class LiveServer:
    """Runs a server until `stop`; its engine goes back to the LLM then."""

    def __init__(self, engine, settings, traces=None):
        self.engine = engine
        self.app = create_app(engine, settings, traces)
        self.serving = self.app.state.serving
        self._ready = threading.Event()
        self.url = None
        self.server = Server(uvicorn_config(self.app, settings), self.app, self._tell)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(SECONDS)
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS, verify=False)

    def _tell(self, url):
        self.url = url
        self._ready.set()

    def _run(self):
        async def main():
            self.loop = asyncio.get_running_loop()
            try:
                await self.server.serve()
            finally:
                await self.engine.shutdown()

        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            runner.run(main())

    def call(self, coroutine):
        """Runs a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)

    def used_blocks(self):
        async def used():
            return sum(group.used for group in (await self.engine.memory_report()).groups)

        return self.call(used())

    def terminate(self):
        """What SIGTERM does."""
        self.server.handle_exit(signal.SIGTERM, None)

    def join(self):
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def stop(self):
        self.server.should_exit = True
        self.http.close()
        self.join()

    # ------------------------------------------------------------------ requests

    def post(self, path, body, **options):
        content = json.dumps(body)  # ASCII: half a character has a way to stand in it
        return self.http.post(path, content=content, headers={"Content-Type": "application/json"}, **options)

    def complete(self, **body):
        return self.answer("/v1/completions", {"model": "tiny", "prompt": "the cab", "max_tokens": 8} | body)

    def chat(self, **body):
        messages = [{"role": "user", "content": "hello"}]
        return self.answer("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 8} | body)

    def answer(self, path, body):
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path, body, status=400):
        """The error of a body that is refused."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    def chunks(self, path, body):
        """The chunks of a stream, which has to end with [DONE]."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Pace:
    """How many steps the engine may still make; held, it answers what it is asked between steps and makes none.

    Attributes:
        left: steps that it may make.
        least: seconds that each takes at least.
    """

    def __init__(self, monkeypatch):
        self.left = math.inf
        self.least = 0.0
        step = Engine.step

        def paced(engine):
            if self.left <= 0:
                time.sleep(0.002)
                return []
            self.left -= 1
            time.sleep(self.least)
            return step(engine)

        monkeypatch.setattr(Engine, "step", paced)

    def make(self, steps):
        """Let so many steps be made, and wait for them."""
        self.left = steps
        until(lambda: self.left <= 0)

    def go_on(self):
        self.left = math.inf


def until(condition, seconds=SECONDS):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def access_lines(caplog):
    """Return what was logged of requests: other tests may have turned on what uvicorn says of itself."""
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "jpaged.access"]
