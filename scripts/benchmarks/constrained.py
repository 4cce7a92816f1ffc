"""Measures what grammars cost: tokens a second next to the same requests without one, and other streams' gaps."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from jpaged import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from scripts.benchmarks.schemas import SHAPES, values
from scripts.cases import Row, Rows

NEXT_TO = ("requests without a grammar", "a kept schema", "new schemas")


def rates(
    model: str = "smollm2-135m",
    requests: list[int] | None = None,
    schemas: list[str] | None = None,
    tokens: int = 24,
    rounds: int = 3,
    greedy: bool = False,
    one_by_one: bool = False,
) -> Iterator[Row]:
    """Tokens a second of constrained requests next to the same without a grammar.

    In each of ROUNDS all sides run once, in turn from both ends; "times" is the median of the rounds' ratios, by
    the clock and by the processor time of the process, which other work on the machine hardly changes. The first round
    compiles and is left out. With --one-by-one both sides ask for log-probabilities, so that no forced run is appended.
    --requests are 1, 8 and 32 unless given, and --schemas all.
    """
    common: dict[str, Any] = {"temperature": 0.0 if greedy else 1.0, "max_tokens": tokens, "ignore_eos": True}
    common["logprobs"] = 0 if one_by_one else None
    requests = requests or [1, 8, 32]
    shapes = {name: SHAPES[name]() for name in schemas or SHAPES}
    llm = LLM(model, max_num_seqs=max(requests), max_num_batched_tokens=max(256, max(requests)), max_model_len=256)

    def run(number: int, shape: StructuredOutputsParams | None) -> tuple[float, float]:
        params = [SamplingParams(seed=seed, structured_outputs=shape, **common) for seed in range(number)]
        clock, processor = time.perf_counter(), time.process_time()
        outputs = llm.generate(["A list as JSON:"] * number, params, use_tqdm=False)
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        return made / (time.perf_counter() - clock), made / (time.process_time() - processor)

    for number in requests:
        sides: dict[str, StructuredOutputsParams | None] = {"": None, **shapes}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(rounds + 1):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                found[name].append(run(number, sides[name]))
        for name in shapes:
            pairs = list(zip(found[name], found[""], strict=True))[1:]
            yield {
                "requests": number,
                "schema": name,
                "tokens/s": statistics.median(rate for (rate, _), _ in pairs),
                "times": statistics.median(own / plain for (own, _), (plain, _) in pairs),
                "times by processor time": statistics.median(own / plain for (_, own), (_, plain) in pairs),
                "load": os.getloadavg()[0],
            }
    llm.close()


def gaps(
    model: str = "smollm2-135m", streams: int = 4, tokens: int = 60, number: int = 10_000, rounds: int = 5
) -> Rows:
    """Milliseconds between two tokens of streams without a grammar, next to a request after the other.

    These have no grammar either, or a schema of --number values, which was compiled before or is new each time. The
    kinds take turns in each of ROUNDS; "times" is the median of the rounds' ratios of their p99, the others are the
    medians of the rounds. The first round compiles and is left out.
    """
    found = asyncio.run(_gaps(model, streams, tokens, number, rounds))
    plain = found[NEXT_TO[0]]
    rows: Rows = []
    for kind, own in found.items():
        p50, p99 = (statistics.median(column) for column in zip(*own, strict=True))
        times = statistics.median(a / b for (_, a), (_, b) in zip(own, plain, strict=True))
        rows.append({"streams": streams, "next to": kind, "p50 ms": p50, "p99 ms": p99, "times": times})
    return rows


async def _gaps(
    model: str, streams: int, tokens: int, number: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the p50 and p99 of each round by what ran next to the streams."""
    llm = AsyncLLM(model, max_num_seqs=streams + 1, max_num_batched_tokens=64, max_model_len=256)
    common: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": tokens}
    ids = itertools.count()
    kept = StructuredOutputsParams(json=values(number))
    new = [StructuredOutputsParams(json=values(number, seed)) for seed in range(1, 4 * (rounds + 1))]

    async def watched(seed: int, found: list[float]) -> None:
        last = None
        async for _ in llm.generate("Once upon a time", SamplingParams(seed=seed, **common), f"watched {next(ids)}"):
            now = time.perf_counter()
            if last is not None:
                found.append(now - last)
            last = now

    async def beside(kind: str) -> None:
        while True:
            shape = None if kind == NEXT_TO[0] else kept if kind == NEXT_TO[1] else new.pop()
            params = SamplingParams(seed=1, structured_outputs=shape, **common)
            async for _ in llm.generate("Items:", params, f"beside {next(ids)}"):
                pass

    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in NEXT_TO}
    for turn in range(rounds + 1):
        for kind in NEXT_TO[:: 1 if turn % 2 else -1]:
            times: list[float] = []
            other = asyncio.create_task(beside(kind))
            await asyncio.gather(*(watched(seed, times) for seed in range(streams)))
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            if turn:
                found[kind].append((1e3 * float(np.quantile(times, 0.5)), 1e3 * float(np.quantile(times, 0.99))))
    await llm.shutdown()
    return found
