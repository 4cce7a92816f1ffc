"""Serves equal requests with vLLM's scheduler and KV cache manager and with this project's, on pools of equal bytes.

No model runs on either side. vLLM's half is `peer_engines/vllm_scheduler.py`, in an environment of its own.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from jpaged.bench.load import read_trace
from jpaged.memory import ChunkedLocalAttention, FullAttention, Policy, SlidingWindow, StateCheckpoints
from scripts.benchmarks.shapes import ModelShape, shape_named
from scripts.benchmarks.simulate import PagedServer
from scripts.benchmarks.workloads import Ask, at_once, draw_articles
from scripts.cases import Row

PEER = Path(__file__).parent / "peer_engines" / "vllm_scheduler.py"
BUDGET, MAX_NUM_SEQS, TOGETHER, BLOCK_SIZE = 2048, 64, 16, 16
"""Most tokens of a step, sequences of a step and unfinished requests, and tokens of a block, of both systems."""

POOLS = {
    "Gemma-3-27B": 8.0,
    "Gemma-4-31B": 14.0,
    "gpt-oss-20b": 1.0,
    "Llama-4-Scout (text)": 6.0,
    "Llama-3.1-8B": 4.0,
    "Llama-3.1-8B + 1B draft": 5.0,
    "Qwen3.6-35B": 4.0,
    "Nemotron-H-8B": 6.0,
    "Granite-4-H-Small": 8.0,
    "Jamba-1.5-Mini": 1.0,
    "Falcon-H1-7B": 6.0,
}
"""GiB of KV for each shape: so little that 16 requests do not all fit, or their prefixes do not."""

OF_JPAGED: dict[str, dict[str, Any]] = {
    "jpaged": {},
    "jpaged, lru": {"prefix_eviction": "lru"},
    "jpaged, aligned": {"prefix_eviction": "aligned"},
    "jpaged, predicted": {"prefix_eviction": "predicted"},
    "jpaged, RAM tier": {"ram": 4.0},
}
OF_VLLM: dict[str, dict[str, Any]] = {
    "vLLM": {},
    "vLLM, match unit 32": {"match_unit": 32},
    "vLLM, dense retention": {"retention": None},
    "vLLM, BLNHC": {"layout": "BLNHC"},
    "vLLM, RAM tier": {"ram": 4.0},
}
"""What each system of vLLM differs in from its defaults; `ram` is the host's memory over the pool's, here too."""


# ---------------------------------------------------------------- loads


def conversations(requests: int, seed: int) -> list[Ask]:
    """Draw four turns of conversations that begin with one of four system prompts."""
    rng, fresh = random.Random(seed), count(1000)

    def take(number: int) -> list[int]:
        return [next(fresh) for _ in range(number)]

    systems = [take(400) for _ in range(4)]
    talks = [list(systems[i % 4]) for i in range(max(1, requests // 4))]
    asks = []
    for _ in range(4):
        for talk in talks:
            talk += take(rng.randint(100, 1500))
            asks.append(Ask(0.0, len(talk), 128, tokens=tuple(talk)))
            talk += [0] * 128  # the answer, as both sides make it up
    return asks[:requests]


def questions(requests: int, seed: int) -> list[Ask]:
    """Draw short questions after one prompt of 480 tokens."""
    rng, fresh = random.Random(seed), count(1000)
    shared = [next(fresh) for _ in range(480)]
    asks = []
    for _ in range(requests):
        tokens = (*shared, *(next(fresh) for _ in range(rng.randint(20, 60))))
        asks.append(Ask(0.0, len(tokens), 32, tokens=tokens))
    return asks


def articles(requests: int, seed: int) -> list[Ask]:
    """Draw questions about one of twelve articles of about 4,000 tokens."""
    return at_once(draw_articles(12, requests, seed, mean=4000))


def agents(requests: int, seed: int) -> list[Ask]:
    """Draw the calls of agents that share a prompt of 2,000 tokens, which grows with each call by answer and result.

    A result has 50 to 800 tokens. An agent ends after three to ten calls, and the next takes its place.
    """
    rng, fresh = random.Random(seed), count(1000)
    tools = [next(fresh) for _ in range(2000)]
    asks: list[Ask] = []
    alive: list[tuple[list[int], int]] = []
    while len(asks) < requests:
        while len(alive) < 8:
            alive.append(([*tools, *(next(fresh) for _ in range(rng.randint(50, 400)))], rng.randint(3, 10)))
        prompt, calls = alive.pop(0)
        asks.append(Ask(0.0, len(prompt), 64, tokens=tuple(prompt)))
        if calls > 1:
            grown = [*prompt, *[0] * 64, *(next(fresh) for _ in range(rng.randint(50, 800)))]
            alive.append((grown, calls - 1))
    return asks


LOADS: dict[str, Callable[[int, int], list[Ask]]] = {
    "conversations": conversations,
    "articles": articles,
    "agents": agents,
    "questions": questions,
}


# ---------------------------------------------------------------- both sides


@dataclass(frozen=True)
class Served:
    """What a system did with one load.

    Attributes:
        asked, found: prompt tokens, and those that were found as a prefix when their request first ran.
        hits: the tokens found of each request.
        running: after each schedule, the tokens of each running request.
        held: bytes that requests held then.
        seconds: median processor time of a step.
    """

    asked: int
    found: int
    preemptions: int
    running: list[list[int]]
    held: list[int]
    seconds: float
    hits: list[int]


Server = Callable[[ModelShape, Sequence[Ask]], Served]
"""Serves the requests of one load on a shape's pool."""


def by_jpaged(
    shape: ModelShape,
    asks: Sequence[Ask],
    *,
    together: int = TOGETHER,
    block_size: int = BLOCK_SIZE,
    ram: float = 0.0,
    **options: Any,
) -> Served:
    """Serve requests in order, at most `together` at once, with this project's scheduler and memory."""
    pool = int(shape.pool_gib * 2**30)
    server = PagedServer(
        shape.groups(block_size),
        pool,
        budget=BUDGET,
        max_num_seqs=MAX_NUM_SEQS,
        prefix_caching=True,
        ram_bytes=int(ram * pool),
        **options,
    )
    waiting, unfinished, times = list(enumerate(asks))[::-1], 0, []
    running, held = [], []
    while waiting or unfinished:
        while waiting and unfinished < together:
            if not server.add(*waiting[-1]):
                raise ValueError(f"a request of {waiting[-1][1].prompt} tokens does not fit {shape.pool_gib} GiB")
            waiting.pop()
            unfinished += 1
        start = time.thread_time()
        step = server.step()
        times.append(time.thread_time() - start)
        assert step is not None, "requests wait although nothing runs"
        unfinished -= len(step.ended)
        running.append(server.lengths)
        held.append(server.held_bytes())
    hits = [server.hits[key] for key in range(len(asks))]
    return Served(server.asked, server.cached, server.preemptions, running, held, statistics.median(times), hits)


class Vllm:
    """Holds the process of vLLM's environment, which serves one case after another. It imports vLLM once.

    Raises:
        ValueError: there is no environment.
    """

    def __init__(self, env: Path) -> None:
        python = env / "bin" / "python"
        if not python.exists():
            raise ValueError(f"env={str(env)!r} is no environment: there is no bin/python")
        self._process = subprocess.Popen(
            [str(python), str(PEER)],
            env=os.environ | {"PYTHONPATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def serve(self, shape: ModelShape, asks: Sequence[Ask], **differing: Any) -> Served:
        """Serve requests with vLLM's defaults apart from what differs, see `case_of`.

        Raises:
            ValueError: vLLM refuses them; the message is its own.
            RuntimeError: the process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(case_of(shape, asks, **differing)), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM's process ended with {self._process.wait()}; its standard error says why")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return Served(**answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def case_of(
    shape: ModelShape,
    asks: Sequence[Ask],
    *,
    together: int = TOGETHER,
    layout: str = "LBNHC",
    match_unit: int | None = None,
    retention: int | None = 0,
    ram: float = 0.0,
) -> Row:
    """Return what `peer_engines/vllm_scheduler.py` reads.

    Args:
        layout: vLLM's name for the order of its pool's axes.
        match_unit: tokens for which prefixes are named; None = those of a block.
        retention: tokens from which on windows' blocks stay; None = all.
        ram: host memory for evicted blocks, over the pool's bytes.
    """
    pool = int(shape.pool_gib * 2**30)
    kinds = {FullAttention: "full", SlidingWindow: "window", ChunkedLocalAttention: "chunk", StateCheckpoints: "state"}
    layers = []
    for kind in (*shape.layers, *shape.draft):
        if type(kind.policy) not in kinds:
            raise ValueError(f"{shape.name}: vLLM's half knows no {type(kind.policy).__name__}")
        layer = {"name": kind.name, "kind": kinds[type(kind.policy)], "number": kind.number}
        layer |= {"token_bytes": kind.token_bytes, "span": _span(kind.policy)}
        layers.append(layer)
    return {
        "layers": layers,
        "pool_bytes": pool,
        "budget": BUDGET,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_len": max(ask.prompt + ask.output for ask in asks),
        "block_size": BLOCK_SIZE,
        "layout": layout,
        "match_unit": match_unit,
        "retention": retention,
        "ram_bytes": int(ram * pool),
        "together": together,
        "asks": [[ask.tokens, ask.output] for ask in asks],
    }


def _span(policy: Policy) -> int:
    """Return the tokens of a window or chunk; 0 for other layers."""
    if isinstance(policy, SlidingWindow):
        return policy.window
    return policy.chunk if isinstance(policy, ChunkedLocalAttention) else 0


def recorded(trace: Path, requests: int, most: int = 16384) -> list[Ask]:
    """Return the first requests of a recorded trace with hash ids whose prompt has at most `most` tokens."""
    demands = [demand for demand in read_trace(trace, 20 * requests) if demand.prompt <= most]
    return at_once(demands[:requests])


def summed(shape: ModelShape, served: Sequence[Served]) -> Row:
    """Return the figures of a system over the loads that it served, one for each seed.

    "read / held" counts the bytes that the next token of each running request reads, so shared ones several times.
    """
    running = [lengths for one in served for lengths in one.running]
    held = [one for each in served for one in each.held]
    read = sum(shape.needed_bytes(length) for lengths in running for length in lengths)
    return {
        "steps": len(running),
        "found": sum(one.found for one in served) / max(1, sum(one.asked for one in served)),
        "batch": statistics.mean(map(len, running)),
        "preemptions": sum(one.preemptions for one in served),
        "held MiB": max(held) / 2**20,
        "read / held": read / max(1, sum(held)),
        "us a step": 1e6 * statistics.median(one.seconds for one in served),
    }


def against_vllm(
    env: Path | None = None,
    models: list[str] | None = None,
    loads: list[str] | None = None,
    systems: list[str] | None = None,
    requests: int = 48,
    seeds: int = 10,
    pool_gib: float | None = None,
    trace: Path | None = None,
) -> Iterator[Row]:
    """Steps and prompt tokens found by vLLM's scheduler and memory and by jpaged's, on equal requests and bytes.

    --env is the environment that peer_engines/environment.sh vllm-core makes; without one jpaged runs alone. --systems
    are prefixes of names, as "vLLM". --trace replaces the drawn loads by a recorded one: a CSV with prompt_len,
    output_len and hash_ids. Figures are sums and means over the seeds.

    Raises:
        ValueError: an unknown load, or no environment there.
    """
    if unknown := set(loads or ()) - set(LOADS):
        raise ValueError(f"loads={sorted(unknown)} are none of {', '.join(LOADS)}")
    drawn: dict[str, list[list[Ask]]] = (
        {trace.stem: [recorded(trace, requests)]}
        if trace
        else {name: [LOADS[name](requests, seed) for seed in range(seeds)] for name in loads or LOADS}
    )
    vllm = Vllm(env) if env else None
    try:
        for model in models or POOLS:
            shape = shape_named(model, pool_gib or POOLS.get(model))
            for load, parts in drawn.items():
                for system, serve in _servers(vllm, systems):
                    row: Row = {"model": model, "GiB": shape.pool_gib, "load": load, "system": system}
                    try:
                        yield row | summed(shape, [serve(shape, asks) for asks in parts])
                    except ValueError as error:
                        yield row | {"refused": str(error)}
    finally:
        if vllm is not None:
            vllm.close()


def _servers(vllm: Vllm | None, chosen: Sequence[str] | None) -> Iterator[tuple[str, Server]]:
    """Yield the systems whose names begin with a chosen one; all without any."""
    servers: dict[str, Server] = {name: partial(by_jpaged, **options) for name, options in OF_JPAGED.items()}
    if vllm is not None:
        servers |= {name: partial(vllm.serve, **options) for name, options in OF_VLLM.items()}
    for name, serve in servers.items():
        if chosen is None or name.startswith(tuple(chosen)):
            yield name, serve
