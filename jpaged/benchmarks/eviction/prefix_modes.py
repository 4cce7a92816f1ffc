"""Runs every order of eviction on every workload, in pools of which cached blocks want more than there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from jpaged.benchmarks.eviction.workloads import SharedWorkload
from jpaged.benchmarks.serving_sim.hybrid_models import CASES
from jpaged.benchmarks.serving_sim.machine import RECENT_ENGINE
from jpaged.benchmarks.serving_sim.models import Served
from jpaged.benchmarks.serving_sim.policies import PAGED
from jpaged.benchmarks.serving_sim.policy import Job, Policy
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.memory import MemoryManager, PoolLayout
from jpaged.memory.manager import PrefixEviction
from jpaged.scheduling import Request

EVICTIONS: tuple[PrefixEviction, ...] = get_args(PrefixEviction)

MODELS = {"Llama-3.1-8B": 1.0, "Gemma-3-27B": 3.5}
"""One kind of layer, two kinds of layers; and how many times as far apart requests arrive, as the second model takes so
much longer for a token."""

POOLS = (0.2,)
"""Sizes of the pools, as shares of what keeping every token of the run would take."""
LEAST_REQUESTS = 3
"""Longest requests that a pool holds at least."""

BUDGET, MAX_NUM_SEQS = 8192, 256
MOST_LOST = 0.02
"""Share of plain LRU's hits that the default order of eviction may lose on a workload, and share by which its mean
first token may come later."""


class Counting(Policy):
    """Serves requests, and counts which of their prompts' tokens were found in the cache.

    Attributes:
        asked, found: prompt tokens of the requests that ended, and those of them that were cached.
    """

    def __init__(self, memory: MemoryManager) -> None:
        super().__init__(PAGED, memory, max_num_seqs=MAX_NUM_SEQS, budget=BUDGET)
        self.asked = self.found = 0

    def ended(self, requests: list[Request], now: float) -> list[Job]:
        self.asked += sum(len(request.prompt_token_ids) for request in requests)
        self.found += sum(request.num_cached_tokens for request in requests)
        return super().ended(requests, now)


def run(workloads: Sequence[SharedWorkload], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row for each model, workload and size of the pool, as plain data."""
    rows = []
    for workload in workloads:
        shared, distinct, longest = workload.sizes()
        asked = sum(ask.prompt for ask in workload.asks)
        for name, slower in MODELS.items():
            served = next(case.served for case in CASES if case.name == name)
            asks = workload.slower(slower)
            for share in POOLS:
                tokens = max(share * distinct, LEAST_REQUESTS * longest)
                found = {
                    eviction: measure(asks, served, int(tokens * served.token_bytes), eviction)
                    for eviction in EVICTIONS
                }
                rows.append(
                    {
                        "model": name,
                        "workload": workload.name,
                        "kind": workload.kind,
                        "requests": len(workload.asks),
                        "share": tokens / distinct,
                        "pool_gib": tokens * served.token_bytes / 2**30,
                        "known": shared / asked,
                        "modes": found,
                    }
                )
                hits = ", ".join(f"{eviction} {it['hits']:.1%}" for eviction, it in found.items())
                say(f"{workload.name}, {name}, {tokens / distinct:.0%} of all tokens: {hits}")
    return rows


def measure(workload: SharedWorkload, served: Served, pool_bytes: int, eviction: PrefixEviction) -> dict[str, float]:
    """Serve a workload by one order of eviction."""
    shape = replace(served.shape, pool_gib=pool_bytes / 2**30)
    layout = PoolLayout.plan(shape.groups(workload.block_size), pool_bytes)
    memory = MemoryManager(layout, max_step_tokens=BUDGET, prefix_caching=True, prefix_eviction=eviction)
    policy = Counting(memory)
    outcome = simulate(policy, served.machine(RECENT_ENGINE, block_size=workload.block_size), workload.asks)
    return {
        "hits": policy.found / max(1, policy.asked),
        "first_token": outcome.first_token,
        "latency": outcome.latency,
        "batch": outcome.batch,
        "preemptions": outcome.preemptions,
        "refused": outcome.refused,
    }


def lost(row: dict[str, Any], eviction: str) -> float:
    """Return the share of plain LRU's hits that another order of eviction loses; negative where it finds more."""
    plain: float = row["modes"]["lru"]["hits"]
    return 1 - row["modes"][eviction]["hits"] / plain if plain else 0.0


def slower(row: dict[str, Any], eviction: str) -> float:
    """Return by which share another order's mean first token comes later than plain LRU's; negative where sooner."""
    plain: float = row["modes"]["lru"]["first_token"]
    return row["modes"][eviction]["first_token"] / plain - 1 if plain and math.isfinite(plain) else 0.0
