"""Measures what HTTP costs: the same requests through `LLM.generate`, `AsyncLLM` and `jpaged serve`, in turns.

    python scripts/bench_http_cost.py [--model smollm2-135m] [--streams 32] [--rounds 5] [--tokens 128]

Each round serves `--streams` requests at once three times: by `LLM.generate`, as streams of `AsyncLLM` in this process,
and as streams over HTTP from a server in a process of its own with the same settings. Printed are the server's tokens a
second as a ratio of `LLM.generate`'s, each in its best round (the aim is 0.95), and the 99th percentile of the time
between two tokens over HTTP less that of `AsyncLLM`'s streams, the least of the rounds (the aim is below 5 ms).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import httpx
import numpy as np

from jpaged import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from jpaged.benchmarks.serving_client import Target, ask_one
from jpaged.benchmarks.serving_load import WORDS, Ask


def by_generate(llm: LLM, prompts: Sequence[str], tokens: int) -> float:
    """Return the seconds that `LLM.generate` takes."""
    start = time.perf_counter()
    llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - start


async def by_engine(llm: LLM, prompts: Sequence[str], tokens: int) -> list[float]:
    """Return the seconds between two tokens of each stream of an `AsyncLLM`."""
    kind = RequestOutputKind.DELTA
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=kind)

    async def one(engine: AsyncLLM, prompt: str, name: str) -> list[float]:
        times = [time.perf_counter() async for _ in engine.generate(prompt, params, name)]
        return [b - a for a, b in pairwise(times)]

    async with AsyncLLM.from_llm(llm) as engine:
        each = await asyncio.gather(*(one(engine, prompt, str(i)) for i, prompt in enumerate(prompts)))
    return [gap for gaps in each for gap in gaps]


async def by_http(url: str, prompts: Sequence[str], tokens: int) -> tuple[float, list[float]]:
    """Return the seconds that all streams of a server take, and those between two parts of each."""
    target = Target(url, "m", extra={"temperature": 0, "ignore_eos": True})
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        start = time.perf_counter()
        asks = [Ask(prompt, tokens) for prompt in prompts]
        answers = await asyncio.gather(*(ask_one(client, target, ask, start) for ask in asks))
        seconds = time.perf_counter() - start
    for answer in answers:
        if answer.error is not None or answer.output_tokens != tokens:
            raise RuntimeError(f"a stream had {answer.output_tokens} of {tokens} tokens: {answer.error}")
    return seconds, [gap for answer in answers for gap in answer.gaps]


def start_server(model: str, streams: int) -> tuple[subprocess.Popen[str], str]:
    """Start a server and return its process and URL, once it takes requests."""
    command = [sys.executable, "-m", "jpaged.cli.main", "serve", model, "--port", "0", "--served-model-name", "m"]
    command += ["--max-num-seqs", str(streams), "--max-model-len", "1024", "--dtype", "float32"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        message = json.loads(line).get("message", "") if line.startswith("{") else ""
        if "is served at" in message:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
            return process, message.split()[-1]
    raise RuntimeError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    words = np.random.default_rng(0).choice(WORDS, (options.rounds + 1, options.streams, 32))
    process, url = start_server(options.model, options.streams)
    try:
        llm = LLM(options.model, max_num_seqs=options.streams, max_model_len=1024, dtype="float32")
        llm.warmup()
        total = options.streams * options.tokens
        generate, http, engine_p99, http_p99 = [], [], [], []
        for number, texts in enumerate(words):
            prompts = [" ".join(text) for text in texts]
            direct = by_generate(llm, prompts, options.tokens)
            gaps = asyncio.run(by_engine(llm, prompts, options.tokens))
            served, served_gaps = asyncio.run(by_http(url, prompts, options.tokens))
            if not number:  # the first round warms up
                continue
            generate.append(total / direct)
            http.append(total / served)
            engine_p99.append(1e3 * np.percentile(gaps, 99))
            http_p99.append(1e3 * np.percentile(served_gaps, 99))
            ratio = http[-1] / generate[-1]
            print(
                f"round {number}: generate {generate[-1]:.1f} tokens/s, HTTP {http[-1]:.1f} ({ratio:.3f}); "
                f"p99 between tokens {engine_p99[-1]:.2f} ms in process, {http_p99[-1]:.2f} ms over HTTP",
                flush=True,
            )
    finally:
        process.terminate()
        process.wait(60)
    print(f"best of {options.rounds}: HTTP over generate {max(http) / max(generate):.3f}")
    added = min(b - a for a, b in zip(engine_p99, http_p99, strict=True))
    print(f"p99 between tokens that HTTP adds: {added:.2f} ms (least of the rounds)")


if __name__ == "__main__":
    main()
