"""Measures what HTTP costs: the same requests through `LLM.generate`, `AsyncLLM` and `jpaged serve`, in turns.

    python scripts/bench_http_cost.py [--model smollm2-135m] [--streams 32] [--rounds 5] [--tokens 128]

Each round serves `--streams` requests at once three times: by `LLM.generate`, as streams of `AsyncLLM` in this process,
and as streams over HTTP from a server in a process of its own with the same settings. Every second round begins with
HTTP. Printed are the server's tokens a second as a ratio of `LLM.generate`'s (the aim is 0.95), and what HTTP adds to
the 99th percentile of the time between two tokens while all streams run (the aim is below 5 ms): when tokens arrive
(`stamped_streams.py`) against when the server's own engine had them, in the same steps, as the speed of a machine
differs from run to run by more. Beside it stands the percentile of all rounds each way. The CPU time that each side
takes for a token hardly depends on what else the machine does. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from stamped_streams import ask_all

from jpaged import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from jpaged.bench.load import WORDS

WARMUP = 1
"""Rounds that are not counted."""
SERVER = """
import sys, time
from jpaged.cli.main import run
from jpaged.engine import thread

steps, deliver = open(sys.argv.pop(1), "w", buffering=1), thread.deliver

def noted(letters, *more):
    if letters:
        steps.write(f"{time.perf_counter()}\\n")
    deliver(letters, *more)

thread.deliver = noted
run()
"""
"""A server that notes, on a clock that all processes share, when its engine had the tokens of each step."""


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


def gaps(streams: Sequence[Sequence[float]]) -> tuple[list[float], float, float]:
    """Return the milliseconds between two tokens of a stream, and the time within which they count: from the moment
    when the last stream had its first token to that when the first had its last, as between two prefills a token takes
    as long as a prefill does."""
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    return [1e3 * (b - a) for times in streams for a, b in pairwise(times) if begin <= a and b <= end], begin, end


def steps_before(
    streams: Sequence[Sequence[float]], steps: np.ndarray, begin: float, end: float
) -> tuple[list[float], list[float]]:
    """Return the milliseconds between the steps from which the tokens of those gaps came, once for each gap, and from
    each token's step to its arrival.

    While all streams run each step has a token for each, so a stream's tokens are those of steps that follow one
    another, and none is of a later step than the latest before it: it may arrive when the next one is over already.
    """
    between: list[float] = []
    behind: list[float] = []
    for times in streams:
        arrived = np.array([at for at in times if begin <= at <= end])
        number = np.arange(len(arrived))
        made = steps[number + (np.searchsorted(steps, arrived) - 1 - number).min(initial=len(steps))]
        between += (1e3 * np.diff(made)).tolist()
        behind += (1e3 * (arrived - made)).tolist()
    return between, behind


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def cpu_seconds(process: int, thread: int | None = None) -> float:
    """Return the CPU time of a process so far, or of one of its threads (Linux)."""
    path = Path(f"/proc/{process}/stat" if thread is None else f"/proc/{process}/task/{thread}/stat")
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Server:
    """A server in a process of its own.

    Attributes:
        steps: file of the times at which its engine had the tokens of a step.
    """

    process: subprocess.Popen[str]
    url: str
    steps: Path

    @classmethod
    def start(cls, model: str, streams: int, steps: Path) -> Server:
        """Start one, and return when it takes requests."""
        command = [sys.executable, "-c", SERVER, str(steps), "serve", model, "--port", "0", "--warmup"]
        command += ["--served-model-name", "m", "--max-num-seqs", str(streams), "--max-model-len", "1024"]
        process = subprocess.Popen([*command, "--dtype", "float32"], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            message = json.loads(line).get("message", "") if line.startswith("{") else ""
            if "is served at" in message:
                threading.Thread(target=process.stderr.read, daemon=True).start()  # its log must not fill the pipe
                return cls(process, message.split()[-1], steps)
        raise RuntimeError("the server did not start")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@dataclass(frozen=True)
class Measured:
    """One round: tokens a second, milliseconds between two tokens, and CPU microseconds a token.

    Attributes:
        step_gaps: between the server's own steps, for each of `http_gaps`.
        behind: milliseconds from a step's end to the arrival of each of its tokens.
    """

    generate: float
    engine: float
    http: float
    engine_gaps: list[float]
    http_gaps: list[float]
    step_gaps: list[float]
    behind: list[float]
    generate_cpu: float
    server_cpu: float
    loop_cpu: float
    client_cpu: float

    @property
    def added(self) -> float:
        return p99(self.http_gaps) - p99(self.step_gaps)

    def __str__(self) -> str:
        return (
            f"generate {self.generate:.1f} tokens/s, AsyncLLM {self.engine:.1f} "
            f"({self.engine / self.generate:.3f}), HTTP {self.http:.1f} ({self.http / self.generate:.3f}); "
            f"p99 between tokens {p99(self.engine_gaps):.1f} ms in process; over HTTP {p99(self.http_gaps):.1f} ms, "
            f"its own steps {p99(self.step_gaps):.1f} ms, tokens arrive {statistics.median(self.behind):.1f} ms behind "
            f"them (p99 {p99(self.behind):.1f}); CPU us a token: generate {self.generate_cpu:.0f}, server "
            f"{self.server_cpu:.0f}, of which its event loop {self.loop_cpu:.0f}, client {self.client_cpu:.0f}"
        )


def one_round(llm: LLM, server: Server, words: np.ndarray, tokens: int, http_first: bool) -> Measured:
    """Serve the same requests each way."""
    prompts, others = ([" ".join(text) for text in texts] for texts in words)
    total, pid = len(prompts) * tokens, server.process.pid
    seconds: dict[bool, float] = {}
    spent: dict[bool, float] = {}
    served: list[list[float]] = []
    loop = busy = 0.0
    for over_http in (http_first, not http_first):
        own, whole, main_thread = time.process_time(), cpu_seconds(pid), cpu_seconds(pid, pid)
        if over_http:
            seconds[True], served = asyncio.run(ask_all(server.url, prompts, tokens))
            busy, loop = cpu_seconds(pid) - whole, cpu_seconds(pid, pid) - main_thread
        else:
            seconds[False] = by_generate(llm, prompts, tokens)
        spent[over_http] = time.process_time() - own
    engine_seconds, streams = asyncio.run(by_engine(llm, others, tokens))
    http_gaps, begin, end = gaps(served)
    step_gaps, behind = steps_before(served, np.loadtxt(server.steps), begin, end)
    return Measured(
        generate=total / seconds[False],
        engine=total / engine_seconds,
        http=total / seconds[True],
        engine_gaps=gaps(streams)[0],
        http_gaps=http_gaps,
        step_gaps=step_gaps,
        behind=behind,
        generate_cpu=1e6 * spent[False] / total,
        server_cpu=1e6 * busy / total,
        loop_cpu=1e6 * loop / total,
        client_cpu=1e6 * spent[True] / total,
    )


def print_summary(rounds: Sequence[Measured]) -> None:
    """Print what all rounds say together."""
    ratios = [each.http / each.generate for each in rounds]
    best = max(each.http for each in rounds) / max(each.generate for each in rounds)
    print(f"HTTP over generate: median {statistics.median(ratios):.3f}, best round over best round {best:.3f}")
    added = [each.added for each in rounds]
    every = {
        name: p99([gap for each in rounds for gap in getattr(each, f"{name}_gaps")])
        for name in ("engine", "http", "step")
    }
    print(
        f"p99 between tokens that HTTP adds to its engine's steps: median {statistics.median(added):.2f} ms, most "
        f"{max(added):.2f} ms, of all rounds together {every['http'] - every['step']:.2f} ms ({every['http']:.1f} over "
        f"{every['step']:.1f}; AsyncLLM's streams in process {every['engine']:.1f})"
    )
    cpu = [each.server_cpu / each.generate_cpu for each in rounds]
    loop = statistics.median(each.loop_cpu for each in rounds)
    print(
        f"the server's CPU time over generate's: median {statistics.median(cpu):.3f}; event loop {loop:.0f} us a token"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    words = np.random.default_rng(0).choice(WORDS, (options.rounds + WARMUP, 2, options.streams, 32))
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server.start(options.model, options.streams, Path(folder) / "steps")
        try:
            llm = LLM(options.model, max_num_seqs=options.streams, max_model_len=1024, dtype="float32")
            llm.warmup()
            for number, drawn in enumerate(words):
                measured = one_round(llm, server, drawn, options.tokens, http_first=number % 2 == 1)
                if number >= WARMUP:
                    rounds.append(measured)
                    print(f"round {number}: {measured}", flush=True)
        finally:
            server.stop()
    print_summary(rounds)


if __name__ == "__main__":
    main()
