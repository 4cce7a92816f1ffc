"""Measures what HTTP costs: the same requests through `LLM.generate`, `AsyncLLM` and `jpaged serve`, in turns.

    python scripts/bench_http_cost.py [--model smollm2-135m] [--streams 32] [--rounds 5] [--tokens 128]

Each round serves `--streams` requests at once three times: by `LLM.generate`, as streams of `AsyncLLM` in this process,
and as streams over HTTP from a server in a process of its own with the same settings. Every second round begins with
HTTP. Printed are the server's tokens a second as a ratio of `LLM.generate`'s (the aim is 0.95), and the 99th percentile
of the time between two tokens over HTTP less that of `AsyncLLM`'s streams (the aim is below 5 ms), both while all
streams run. The CPU time that each side takes for a token hardly depends on what else the machine does. The client,
which shares the machine with the server, notes what comes and when, and reads it after the end. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from jpaged import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from jpaged.benchmarks.serving_load import WORDS

WARMUP = 1
"""Rounds that are not counted."""


def by_generate(llm: LLM, prompts: Sequence[str], tokens: int) -> float:
    """Return the seconds that `LLM.generate` takes."""
    start = time.perf_counter()
    llm.generate(list(prompts), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - start


async def by_engine(llm: LLM, prompts: Sequence[str], tokens: int) -> tuple[float, list[list[float]]]:
    """Return the seconds that all streams of an `AsyncLLM` take, and when the tokens of each came."""
    kind = RequestOutputKind.DELTA
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=kind)

    async def one(engine: AsyncLLM, prompt: str, name: str) -> list[float]:
        return [time.perf_counter() async for _ in engine.generate(prompt, params, name)]

    async with AsyncLLM.from_llm(llm) as engine:
        start = time.perf_counter()
        streams = await asyncio.gather(*(one(engine, prompt, str(i)) for i, prompt in enumerate(prompts)))
        return time.perf_counter() - start, streams


class Stream(asyncio.Protocol):
    """A client that keeps what it is sent, and when, and looks at it later."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._pieces: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        if b"[DONE]" in data:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def read(self) -> tuple[list[float], int]:
        """Return when each piece with a token came, and the tokens that the server counted.

        Raises:
            RuntimeError: the stream did not come to its end.
        """
        answer = b"".join(data for _, data in self._pieces)
        if b"[DONE]" not in answer:
            raise RuntimeError(f"a stream did not end: {answer[-300:]!r}")
        last = json.loads(answer.rsplit(b"data: ", 2)[1].split(b"\n")[0])
        return [at for at, data in self._pieces if b'"text":' in data], last["usage"]["completion_tokens"]


async def by_http(url: str, prompts: Sequence[str], tokens: int) -> tuple[float, list[list[float]]]:
    """Return the seconds that all streams of a server take, and when the tokens of each came."""
    host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80
    fixed = {"model": "m", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    fixed["stream_options"] = {"include_usage": True}
    requests = []
    for prompt in prompts:
        body = json.dumps(fixed | {"prompt": prompt}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    streams = [(await loop.create_connection(partial(Stream, request), host, port))[1] for request in requests]
    await asyncio.gather(*(stream.ended for stream in streams))
    seconds = time.perf_counter() - start
    answers = [stream.read() for stream in streams]
    if any(count != tokens for _, count in answers):
        raise RuntimeError(f"streams had {sorted({count for _, count in answers})} tokens, not {tokens}")
    return seconds, [times for times, _ in answers]


def p99(streams: Sequence[Sequence[float]]) -> float:
    """Return the 99th percentile of the milliseconds between two tokens, from the moment when the last stream had its
    first token to that when the first had its last: between two prefills a token takes as long as a prefill does."""
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    gaps = [b - a for times in streams for a, b in pairwise(times) if begin <= a and b <= end]
    return 1e3 * float(np.percentile(gaps, 99))


def cpu_seconds(process: int, thread: int | None = None) -> float:
    """Return the CPU time of a process so far, or of one of its threads (Linux)."""
    path = Path(f"/proc/{process}/stat" if thread is None else f"/proc/{process}/task/{thread}/stat")
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_server(model: str, streams: int) -> tuple[subprocess.Popen[str], str]:
    """Start a server and return its process and URL, once it takes requests."""
    command = [sys.executable, "-m", "jpaged.cli.main", "serve", model, "--port", "0", "--served-model-name", "m"]
    command += ["--max-num-seqs", str(streams), "--max-model-len", "1024", "--dtype", "float32", "--warmup"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        message = json.loads(line).get("message", "") if line.startswith("{") else ""
        if "is served at" in message:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
            return process, message.split()[-1]
    raise RuntimeError("the server did not start")


@dataclass(frozen=True)
class Measured:
    """One round: tokens a second, p99 between two tokens in ms, and CPU microseconds a token."""

    generate: float
    engine: float
    http: float
    engine_p99: float
    http_p99: float
    generate_cpu: float
    server_cpu: float
    loop_cpu: float
    client_cpu: float

    def __str__(self) -> str:
        return (
            f"generate {self.generate:.1f} tokens/s, AsyncLLM {self.engine:.1f} "
            f"({self.engine / self.generate:.3f}), HTTP {self.http:.1f} ({self.http / self.generate:.3f}); "
            f"p99 between tokens {self.engine_p99:.1f} ms in process, {self.http_p99:.1f} ms over HTTP; "
            f"CPU us a token: generate {self.generate_cpu:.0f}, server {self.server_cpu:.0f}, of which its event loop "
            f"{self.loop_cpu:.0f}, client {self.client_cpu:.0f}"
        )


def one_round(llm: LLM, server: int, url: str, words: np.ndarray, tokens: int, http_first: bool) -> Measured:
    """Serve the same requests each way."""
    prompts, others = ([" ".join(text) for text in texts] for texts in words)
    total = len(prompts) * tokens
    seconds: dict[bool, float] = {}
    spent: dict[bool, float] = {}
    served: list[list[float]] = []
    loop = busy = 0.0
    for over_http in (http_first, not http_first):
        own, whole, main_thread = time.process_time(), cpu_seconds(server), cpu_seconds(server, server)
        if over_http:
            seconds[True], served = asyncio.run(by_http(url, prompts, tokens))
            busy, loop = cpu_seconds(server) - whole, cpu_seconds(server, server) - main_thread
        else:
            seconds[False] = by_generate(llm, prompts, tokens)
        spent[over_http] = time.process_time() - own
    engine_seconds, streams = asyncio.run(by_engine(llm, others, tokens))
    return Measured(
        generate=total / seconds[False],
        engine=total / engine_seconds,
        http=total / seconds[True],
        engine_p99=p99(streams),
        http_p99=p99(served),
        generate_cpu=1e6 * spent[False] / total,
        server_cpu=1e6 * busy / total,
        loop_cpu=1e6 * loop / total,
        client_cpu=1e6 * spent[True] / total,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    words = np.random.default_rng(0).choice(WORDS, (options.rounds + WARMUP, 2, options.streams, 32))
    process, url = start_server(options.model, options.streams)
    rounds = []
    try:
        llm = LLM(options.model, max_num_seqs=options.streams, max_model_len=1024, dtype="float32")
        llm.warmup()
        for number, drawn in enumerate(words):
            measured = one_round(llm, process.pid, url, drawn, options.tokens, http_first=number % 2 == 1)
            if number >= WARMUP:
                rounds.append(measured)
                print(f"round {number}: {measured}", flush=True)
    finally:
        process.terminate()
        process.wait(60)
    ratios = [each.http / each.generate for each in rounds]
    best = max(each.http for each in rounds) / max(each.generate for each in rounds)
    print(f"HTTP over generate: median {statistics.median(ratios):.3f}, best round over best round {best:.3f}")
    added = [each.http_p99 - each.engine_p99 for each in rounds]
    print(f"p99 between tokens that HTTP adds: median {statistics.median(added):.2f} ms, least {min(added):.2f} ms")
    cpu = [each.server_cpu / each.generate_cpu for each in rounds]
    loop = statistics.median(each.loop_cpu for each in rounds)
    print(
        f"the server's CPU time over generate's: median {statistics.median(cpu):.3f}; event loop {loop:.0f} us a token"
    )


if __name__ == "__main__":
    main()
