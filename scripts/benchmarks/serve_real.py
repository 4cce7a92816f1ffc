"""Serves requests that arrive over time on the real engine: by itself, and with a gate that admits as Orca does.

The gate stands in front of the engine and lets a request in only when a buddy allocator over as many token slots as the
pool has gives it its region. So the systems differ in what they admit, and in nothing that is computed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from jpaged import LLM, AsyncLLM, SamplingParams
from jpaged.bench.load import arrival_times
from jpaged.bench.prompts import Lengths, real_prompts
from scripts.benchmarks.baselines import Buddy, Regions, Reservation, reservations
from scripts.benchmarks.workloads import chatbot_turns, pairs_of
from scripts.cases import Row, Rows


class Gate:
    """Admits requests first come, first served, each with a contiguous region that it keeps to its end.

    Args:
        request_level: admit a request only if none is inside, as FasterTransformer admits batches.
    """

    def __init__(self, regions: Buddy | Regions, reserve: Reservation, *, request_level: bool = False) -> None:
        self._regions, self._reserve, self._request_level = regions, reserve, request_level
        self._waiting: deque[tuple[int, asyncio.Future[tuple[int, int]]]] = deque()
        self._inside = 0

    async def enter(self, prompt: int, output: int) -> tuple[int, int]:
        """Wait for a region and return it.

        Raises:
            ValueError: an empty pool has no region as large.
        """
        slots = self._reserve(prompt, output)
        if not self._regions.fits(slots):
            raise ValueError(f"a request of {prompt} + {output} tokens reserves {slots} slots, more than the pool has")
        turn: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((slots, turn))
        self._admit()
        return await turn

    def leave(self, region: tuple[int, int]) -> None:
        self._regions.give(*region)
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        if self._request_level and self._inside:
            return
        while self._waiting and (region := self._regions.take(self._waiting[0][0])) is not None:
            self._inside += 1
            self._waiting.popleft()[1].set_result(region)


def gate_of(name: str, slots: int, longest: int) -> Gate | None:
    """Return the gate of a system by its name; None for jpaged, which needs none."""
    if name == "jpaged":
        return None
    if name == "FasterTransformer":
        return Gate(Regions(slots, longest), lambda prompt, output: longest, request_level=True)
    return Gate(Buddy(slots), reservations(longest)[name])


@dataclass(frozen=True)
class Task:
    """One request: its prompt's tokens, the tokens of its output, and when it is sent."""

    prompt: list[int]
    output: int
    due: float


def serve_real(
    model: str = "smollm2-135m",
    rates: list[float] = [2.0, 4.0],  # noqa: B006 (never changed; the command line shows it)
    seconds: float = 10.0,
    pool_tokens: int = 4096,
    max_model_len: int = 1024,
    mean_input: float = 160,
    mean_output: float = 64,
    seed: int = 0,
    trace: Path | None = None,
) -> Rows:
    """Latency and throughput of jpaged against Orca's reservations on the real engine (PagedAttention, figure 12).

    Prefixes are not cached, so that all systems compute the same. Lengths are those of --trace, else lognormal.
    """
    llm = _engine(model, pool_tokens, max_model_len, max_num_seqs=64)
    tokenizer = llm.tokenizer
    rows: Rows = []

    async def run() -> None:
        async with AsyncLLM.from_llm(llm) as engine:
            for rate in rates:
                number = max(2, int(rate * seconds))
                if trace is None:
                    pairs = Lengths(number, mean_input, mean_output, seed=seed).draw(max_model_len)
                else:
                    pairs = [(p, o) for p, o in pairs_of(trace) if p + o <= max_model_len][:number]
                tasks = _tasks(tokenizer, pairs, rate, seed)
                for name in ("jpaged", "Orca (Oracle)", "Orca (Pow2)", "Orca (Max)", "FasterTransformer"):
                    start = time.perf_counter()
                    latencies = await _serve(engine, tasks, gate_of(name, pool_tokens, max_model_len))
                    tokens = sum(task.output for task in tasks) / (time.perf_counter() - start)
                    row = {"requests/s": rate, "system": name, "s/token": mean(latencies)}
                    rows.append(row | {"output tokens/s": tokens})

    asyncio.run(run())
    return rows


def chatbot(
    model: str = "smollm2-135m",
    requests: int = 24,
    shares: list[float] = [],  # noqa: B006 (never changed)
    longest: int = 256,
    pool_requests: float = 4.0,
    seed: int = 0,
    trace: Path | None = None,
) -> Rows:
    """Steps, rate and latency of a chatbot's turns against Orca's reservations on the real engine (figure 17).

    A prompt is a conversation so far, cut to half of --longest tokens; the other half is the most that an answer has,
    as in the paper, whose longest request has 2,048. Lengths are those of ShareGPT's conversations, or of --trace, over
    2,048 / --longest. The pool holds --pool-requests of the longest; the paper's held 7.7. First all requests are there
    at once; then they arrive at --shares of the rate at which jpaged served those. "times" is a system's steps or
    latency over jpaged's.
    """
    llm = _engine(model, int(pool_requests * longest), longest, max_num_seqs=16, max_num_batched_tokens=longest)
    pairs = chatbot_turns(requests, longest, seed, trace)
    rows: Rows = []

    async def run() -> None:
        async with AsyncLLM.from_llm(llm) as engine:
            rate = math.inf
            for share in (None, *shares):
                tasks = _tasks(llm.tokenizer, pairs, rate if share is None else share * rate, seed)
                first: Row = {}
                for name in ("jpaged", "Orca (Oracle)", "Orca (Pow2)", "Orca (Max)"):
                    before, start = engine.stats(), time.perf_counter()
                    latency = mean(await _serve(engine, tasks, gate_of(name, int(pool_requests * longest), longest)))
                    served = len(tasks) / (time.perf_counter() - start)
                    steps = engine.stats().num_steps - before.num_steps
                    preemptions = engine.stats().num_preemptions - before.num_preemptions
                    row: Row = {"share": share or "at once", "system": name, "steps": steps, "preemptions": preemptions}
                    row |= {"tokens a step": sum(task.output for task in tasks) / steps, "requests/s": served}
                    row["s/token"] = latency
                    first = first or row
                    row |= {f"{figure}, times": row[figure] / first[figure] for figure in ("steps", "s/token")}
                    rows.append(row)
                if share is None:
                    rate = first["requests/s"]

    asyncio.run(run())
    return rows


def _engine(model: str, pool_tokens: int, max_model_len: int, **sizes: int) -> LLM:
    """Return a warm engine without prefix cache whose pool has at least so many tokens."""
    settings: dict[str, Any] = {"max_model_len": max_model_len, "enable_prefix_caching": False, **sizes}
    probe = LLM(model, kv_cache_memory_bytes=1 << 27, enforce_eager=True, **settings)
    pool = probe.memory_report().page_bytes * -(-pool_tokens // probe.config.block_size)
    probe.close()
    llm = LLM(model, kv_cache_memory_bytes=pool, **settings)
    llm.warmup(use_tqdm=False)
    return llm


def _tasks(tokenizer: Any, pairs: Sequence[tuple[int, int]], rate: float, seed: int) -> list[Task]:
    """Return requests of these prompts and outputs, in tokens, which arrive at a rate a second."""
    prompts = real_prompts(tokenizer, [prompt for prompt, _ in pairs])
    times = arrival_times(rate, len(pairs), seed)
    return [Task(p, o, due) for p, (_, o), due in zip(prompts, pairs, times, strict=True)]


async def _serve(engine: AsyncLLM, tasks: Sequence[Task], gate: Gate | None) -> list[float]:
    """Send every task when it is due, and return each one's seconds to the end for a token of its output."""
    start = time.perf_counter()

    async def one(number: int, task: Task) -> float:
        await asyncio.sleep(max(0.0, start + task.due - time.perf_counter()))
        region = None if gate is None else await gate.enter(len(task.prompt), task.output)
        params = SamplingParams(temperature=0.0, max_tokens=task.output, ignore_eos=True)
        async for _ in engine.generate({"prompt_token_ids": task.prompt}, params, f"{id(tasks)}-{start}-{number}"):
            pass
        if gate is not None and region is not None:
            gate.leave(region)
        return (time.perf_counter() - start - task.due) / task.output

    return list(await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks))))
