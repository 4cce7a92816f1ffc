"""Answers a file of requests, no two steps of the engine within 20 ms, until it is killed.

Run: batch_process.py FOLDER IN OUT
"""

import asyncio
import sys
import time
from pathlib import Path

from live_server import make_llm

from jpaged import AsyncLLM
from jpaged.engine.engine import Engine
from jpaged.server.app import create_app
from jpaged.server.batch import read_requests, run_batch
from jpaged.server.settings import ServerSettings

step = Engine.step


def slow(engine):
    time.sleep(0.02)
    return step(engine)


Engine.step = slow


async def main(folder, requests, output):
    async with AsyncLLM.from_llm(make_llm(folder)) as engine:
        app = create_app(engine, ServerSettings(model="tiny"))
        await run_batch(app, read_requests(Path(requests)), Path(output), concurrency=3)


asyncio.run(main(*sys.argv[1:]))
