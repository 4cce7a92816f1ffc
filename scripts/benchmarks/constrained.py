"""Measures what grammars cost: tokens a second next to the same requests without one, and other streams' gaps."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import numpy as np

from jpaged import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from scripts.cases import Rows

PEOPLE: dict[str, Any] = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
"""A list that no answer of some hundred tokens completes, so that all requests have equally many."""


def values(number: int, seed: int) -> dict[str, Any]:
    """Return a schema of so many values, another one for each seed."""
    random = np.random.default_rng(seed)
    enum = [f"item {random.integers(10**9)} of {seed}.{place}" for place in range(number)]
    return {"type": "array", "minItems": 50, "items": {"enum": enum}}


def rates(
    model: str = "smollm2-135m",
    requests: list[int] | None = None,
    tokens: int = 128,
    rounds: int = 3,
    greedy: bool = False,
) -> Rows:
    """Tokens a second of requests with a schema, with and without forced runs, and of the same without; the best of
    --rounds, which take turns. The numbers of --requests are 1, 8 and 32 unless given."""
    common: dict[str, Any] = {"temperature": 0.0 if greedy else 1.0, "max_tokens": tokens, "ignore_eos": True}
    shape = StructuredOutputsParams(json=PEOPLE)
    kinds: dict[str, dict[str, Any]] = {
        "without": {},
        "drawn one by one": {"structured_outputs": shape, "logprobs": 0},
        "constrained": {"structured_outputs": shape},
        "without, with logprobs": {"logprobs": 0},
    }
    requests = requests or [1, 8, 32]
    llm = LLM(model, max_num_seqs=max(requests), max_num_batched_tokens=max(256, max(requests)), max_model_len=512)
    rows: Rows = []
    for number in requests:
        best = dict.fromkeys(kinds, 0.0)
        for turn in range(rounds + 1):  # the first compiles
            for kind, own in kinds.items():
                params = [SamplingParams(seed=seed, **common, **own) for seed in range(number)]
                start = time.perf_counter()
                outputs = llm.generate(["A list of people as JSON:"] * number, params, use_tqdm=False)
                seconds = time.perf_counter() - start
                made = sum(len(output.outputs[0].token_ids) for output in outputs)
                if turn:
                    best[kind] = max(best[kind], made / seconds)
        rows += [
            {
                "requests": number,
                "kind": kind,
                "tokens/s": rate,
                "times without": rate / best["without, with logprobs" if "logprobs" in kinds[kind] else "without"],
            }
            for kind, rate in best.items()
        ]
    llm.close()
    return rows


def gaps(
    model: str = "smollm2-135m", streams: int = 4, tokens: int = 300, number: int = 10_000, rounds: int = 3
) -> Rows:
    """Milliseconds between two tokens of streams without a grammar: alone, next to a stream that has none either, and
    next to one with a schema of --number values, which was compiled before or is new each time; the least p99."""
    kinds = ("alone", "next to a plain stream", "next to a kept schema", "next to a new schema")
    found = asyncio.run(_gaps(model, streams, tokens, number, rounds, kinds))
    return [
        {"streams": streams, "kind": kind, "p50 ms": p50, "p99 ms": p99, "times plain": p99 / found[kinds[1]][1]}
        for kind, (p50, p99) in found.items()
    ]


async def _gaps(
    model: str, streams: int, tokens: int, number: int, rounds: int, kinds: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    llm = AsyncLLM(model, max_num_seqs=streams + 1, max_num_batched_tokens=64, max_model_len=1024)
    plain: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
    ids, seeds = itertools.count(), itertools.count()
    least: dict[str, tuple[float, float]] = {}

    async def watched(seed: int, times: list[float]) -> None:
        params = SamplingParams(seed=seed, max_tokens=tokens, **plain)
        last = None
        async for _ in llm.generate("Once upon a time", params, f"watched {next(ids)}"):
            now = time.perf_counter()
            if last is not None:
                times.append(now - last)
            last = now

    async def beside(kind: str) -> None:
        while True:
            shape = None
            if kind.endswith("schema"):
                schema = values(number, next(seeds) if "new" in kind else -1)
                shape = StructuredOutputsParams(json=schema)
            params = SamplingParams(seed=1, max_tokens=60, structured_outputs=shape, **plain)
            async for _ in llm.generate("Items:", params, f"beside {next(ids)}"):
                pass

    for turn in range(rounds + 1):
        for kind in kinds:
            times: list[float] = []
            other = None if kind == "alone" else asyncio.create_task(beside(kind))
            await asyncio.gather(*(watched(seed, times) for seed in range(streams)))
            if other is not None:
                other.cancel()
                await asyncio.gather(other, return_exceptions=True)
            p50, p99 = (1e3 * float(np.quantile(times, part)) for part in (0.5, 0.99))
            if turn and (kind not in least or p99 < least[kind][1]):
                least[kind] = p50, p99
    await llm.shutdown()
    return least
