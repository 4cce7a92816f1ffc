"""Measures what an engine loses while the memory page watches it: the same requests with and without, in turns.

    python scripts/bench_memory_watch.py [--blocks 100000] [--rounds 10] [--requests 224]

A small random model with two layer groups has a pool of so many blocks. Each round serves the same requests through
`AsyncLLM` twice, once with a `MemoryFeed` whose messages are read at the page's rate. What is printed are medians of
the rounds' ratios, of tokens a second and of tokens a CPU-second, and what maps and messages took of the time; the last
hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from jpaged import AsyncLLM, SamplingParams
from jpaged.memory import MemoryManager
from jpaged.server.memory_page import MemoryFeed, feed
from scripts.benchmarks.random_model import gemma3_config, save_random_gemma3

PROMPT, OUTPUT = 96, 128


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return the same function, which notes the CPU time of each call."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **options)
        finally:
            spent.append(time.thread_time() - start)

    return call


async def serve(engine: AsyncLLM, requests: int, name: str) -> tuple[float, float]:
    """Return output tokens a second and a CPU-second of `requests` requests at once."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)

    async def one(number: int) -> None:
        prompt = {"prompt_token_ids": [3 + (number * 31 + i) % 1000 for i in range(PROMPT)], "cache_salt": name}
        async for _ in engine.generate(prompt, params, f"{name}-{number}"):
            pass

    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(number) for number in range(requests)))
    tokens = requests * OUTPUT
    return tokens / (time.perf_counter() - start), tokens / (time.process_time() - cpu)


async def measure(engine: AsyncLLM, rounds: int, requests: int) -> list[tuple[float, float, int]]:
    """Return for each round tokens a second and a CPU-second, watched over not watched, and the messages read."""
    watched_engine, watched_seconds, busy = MemoryFeed(engine), 0.0, 0.0
    spent: list[float] = []
    MemoryManager.map = timed(MemoryManager.map, spent)  # type: ignore[method-assign]
    feed.sample_message = timed(feed.sample_message, spent)

    async def watch(read: list[int]) -> None:
        async for message in watched_engine.messages():
            read.append(len(message))

    await serve(engine, requests, "first")
    ratios = []
    for number in range(rounds):
        results: dict[bool, tuple[float, float]] = {}
        read: list[int] = []
        for watched in (False, True) if number % 2 else (True, False):
            task = asyncio.create_task(watch(read)) if watched else None
            if task is not None:
                while not read:  # the whole pool is told once, and that is not what is measured
                    await asyncio.sleep(0.01)
            spent.clear()
            start = time.perf_counter()
            results[watched] = await serve(engine, requests, f"{number}-{watched}")
            if task is not None:
                watched_seconds, busy = watched_seconds + time.perf_counter() - start, busy + sum(spent)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        (speed, cpu), (plain, plain_cpu) = results[True], results[False]
        ratios.append((speed / plain, cpu / plain_cpu, len(read)))
        print(f"round {number}: {plain:.0f} tokens/s, watched {speed:.0f}; {len(read)} messages", flush=True)
    share = busy / watched_seconds
    print(f"maps and messages took {busy:.2f} s of CPU in {watched_seconds:.1f} s watched, {share:.2%} of a core")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=224)
    arguments = parser.parse_args()

    async def run(folder: str, settings: dict) -> list[tuple[float, float, int]]:
        async with AsyncLLM(folder, **settings) as engine:
            seen = await engine.memory_map()
            blocks = sum(len(group.blocks) for group in seen.groups)
            print(f"{blocks:,} blocks in {seen.num_pages:,} large pages of {seen.page_bytes:,} bytes", flush=True)
            return await measure(engine, arguments.rounds, arguments.requests)

    with tempfile.TemporaryDirectory() as folder:
        save_random_gemma3(Path(folder), gemma3_config(hidden=128, mlp=256, layers=6, vocab=1024))
        page = 5 * 8192  # five blocks of the one global layer, or one of the five local ones
        pool = -(-arguments.blocks // 6) * page
        settings = {"dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 256}
        ratios = asyncio.run(run(folder, {"kv_cache_memory_bytes": pool, "disable_log_stats": True, **settings}))
    speed, cpu = (statistics.median(ratio[i] for ratio in ratios) for i in (0, 1))
    print(f"watched / not watched, medians of {len(ratios)} rounds: tokens/s {speed:.3f}, tokens/CPU-second {cpu:.3f}")


if __name__ == "__main__":
    main()
