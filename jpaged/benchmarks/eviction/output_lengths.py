"""Tells a scheduler how long outputs will be, by guesses, by users' hints or truly, and measures what that is worth.

None of this is in the engine: docs/eviction.md says why. What is told is used where a length could matter. Admission
lets a request in only where the memory that will be wanted at the most crowded moment to come is there; and the request
that gives its memory back is the one that would keep it longest, not the newest.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.benchmarks.serving_sim.curves import WARM_UP
from jpaged.benchmarks.serving_sim.machine import PAPER_ENGINE
from jpaged.benchmarks.serving_sim.models import OPT_13B
from jpaged.benchmarks.serving_sim.policies import PAGED
from jpaged.benchmarks.serving_sim.policy import BUDGET, MAX_NUM_SEQS, Job, Policy
from jpaged.benchmarks.serving_sim.simulation import simulate
from jpaged.benchmarks.serving_sim.workload import Workload, alpaca, find, sharegpt
from jpaged.memory import BlockCopy, MemoryManager, PoolLayout
from jpaged.scheduling import Request, Scheduler
from jpaged.scheduling.step_builder import StepPlan

RATES = {"ShareGPT": (2.0, 2.25), "Alpaca": (31.0, 32.0)}
"""Requests/s at which memory binds and requests are preempted, OPT-13B on one A100-40G."""
SEEDS = 3
"""Seeds of arrivals, lengths and hints."""
WINS = 0.05
"""Share of the latency that a source and use of lengths must save, in every run of every seed, to be worth having."""

QUANTILE = 0.8
"""Quantile of the lengths seen that a guess is."""
MOST_SEEN = 2000
"""Outputs that a class of prompts remembers."""
LEAST_SEEN = 20
"""Outputs of a class below which those of all classes are looked at."""
HINT_ERROR = 0.3
"""Standard deviation of the logarithm of a hint over the true length."""

USES = {"admission": (True, False), "victims": (False, True), "both": (True, True)}
SOURCES = ("quantiles", "hints", "Oracle")


class Quantiles:
    """Guesses an output's length from those of earlier prompts of the same class: within a factor of two as long."""

    def __init__(self) -> None:
        self._recent: defaultdict[int, deque[int]] = defaultdict(deque)
        self._ordered: defaultdict[int, list[int]] = defaultdict(list)

    def learn(self, prompt: int, output: int) -> None:
        """Note an output that has ended, in tokens."""
        for key in (prompt.bit_length(), -1):
            recent, ordered = self._recent[key], self._ordered[key]
            recent.append(output)
            insort(ordered, output)
            if len(recent) > MOST_SEEN:
                ordered.pop(bisect_right(ordered, recent.popleft()) - 1)

    def expect(self, prompt: int, generated: int) -> int:
        """Return how many more tokens an output of `generated` tokens will have: a quantile of those that were longer;
        0 where nothing is known."""
        ordered = self._ordered[prompt.bit_length()]
        if len(ordered) - bisect_right(ordered, generated) < LEAST_SEEN:
            ordered = self._ordered[-1]
        first = bisect_right(ordered, generated)
        longer = len(ordered) - first
        return ordered[first + int(QUANTILE * (longer - 1))] - generated if longer else 0


class ToldScheduler(Scheduler):
    """Admits, and preempts, by how many tokens each request is said to lack.

    Args:
        lacks: returns how many more tokens a request will generate.
        admits, chooses: whether this decides who is admitted, and who gives memory back.
    """

    def __init__(
        self,
        memory: MemoryManager,
        lacks: Callable[[Request], int],
        *,
        admits: bool,
        chooses: bool,
        max_num_seqs: int,
        budget: int,
    ) -> None:
        super().__init__(memory, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self._lacks, self._admits, self._chooses = lacks, admits, chooses
        group = memory.layout.groups[0]
        self._slots, self._block = group.num_blocks * group.spec.block_size, group.spec.block_size

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        if self._admits and self.running and most_held([*self.running, request], self._held, self._lacks) > self._slots:
            return False
        return super()._admit(request, plan)

    def _held(self, request: Request) -> int:
        tokens = sum(seq.num_tokens for seq in request.live)
        return tokens + self._block * len(request.live) // 2  # the last block of each is half full

    def _preempt_last(
        self, plan: StepPlan, planned: Request | None = None, unmade: Sequence[BlockCopy] = ()
    ) -> Request:
        if self._chooses and planned is not None:
            first = self.running.index(planned)  # those before it have their places in the step
            place = max(range(first, len(self.running)), key=lambda place: self._lacks(self.running[place]))
            self.running.append(self.running.pop(place))
        return super()._preempt_last(plan, planned, unmade)


def most_held(requests: Sequence[Request], held: Callable[[Request], int], lacks: Callable[[Request], int]) -> int:
    """Return the most tokens that requests will hold at once, if each ends when it has what it lacks: most is held just
    before an end."""
    most, before = 0, 0
    longest_first = sorted(((lacks(request), held(request)) for request in requests), reverse=True)
    for number, (rest, now) in enumerate(longest_first, start=1):
        before += now
        most = max(most, before + number * rest)
    return most


class ToldPolicy(Policy):
    """Serves requests by a `ToldScheduler`.

    Args:
        source: one of `SOURCES`, or None: nothing is told.
        use: one of `USES`.
    """

    def __init__(self, source: str | None, use: str, seed: int) -> None:
        memory = MemoryManager(PoolLayout.plan(OPT_13B.shape.groups(), OPT_13B.pool_bytes), max_step_tokens=BUDGET)
        super().__init__(f"{PAGED}, {source}", memory)
        self._rng, self._quantiles = np.random.default_rng(seed), Quantiles()
        self._hints: dict[int, int] = {}
        if source is not None:
            lacks = {"quantiles": self._guessed, "hints": self._hinted, "Oracle": _truly}[source]
            admits, chooses = USES[use]
            self.scheduler = ToldScheduler(
                memory, lacks, admits=admits, chooses=chooses, max_num_seqs=MAX_NUM_SEQS, budget=BUDGET
            )

    def ended(self, requests: list[Request], now: float) -> list[Job]:
        for request in requests:
            self._quantiles.learn(len(request.prompt_token_ids), _length(request))
            self._hints.pop(request.request_id, None)
        return super().ended(requests, now)

    def _guessed(self, request: Request) -> int:
        return self._quantiles.expect(len(request.prompt_token_ids), _generated(request))

    def _hinted(self, request: Request) -> int:
        hint = self._hints.get(request.request_id)
        if hint is None:
            hint = round(_length(request) * float(np.exp(self._rng.normal(0.0, HINT_ERROR))))
            self._hints[request.request_id] = hint
        return max(1, hint - _generated(request))


def _length(request: Request) -> int:
    length = request.params.max_tokens
    assert length is not None, "outputs of the simulation end at max_tokens"
    return length


def _generated(request: Request) -> int:
    return request.sequences[0].num_tokens - len(request.prompt_token_ids)


def _truly(request: Request) -> int:
    return _length(request) - _generated(request)


def told_workloads(folder: Path | None, count: Callable[[str], int]) -> list[Workload]:
    """Return ShareGPT's lengths, and Alpaca's where a folder has them.

    Args:
        count: number of tokens of a text.
    """
    found = [sharegpt()]
    if folder is not None and find(folder, "alpaca*.jsonl"):
        found.append(alpaca(folder, count))
    return found


def run(workloads: Sequence[Workload], seconds: float, seed: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row for each workload, rate, seed from `seed` on, source of lengths and use of them, as plain data."""
    rows: list[dict[str, Any]] = []
    for each in range(seed, seed + SEEDS):
        rows += _runs(workloads, seconds, each, say)
    return rows


def _runs(workloads: Sequence[Workload], seconds: float, seed: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    ways = [(None, "-"), *((source, use) for source in SOURCES for use in USES)]
    for workload in workloads:
        for rate in RATES[workload.name]:
            asks = workload.arrivals(rate, int(rate * seconds), seed)
            for source, use in ways:
                policy, machine = ToldPolicy(source, use, seed), OPT_13B.machine(PAPER_ENGINE)
                outcome = simulate(policy, machine, asks, warm_up=WARM_UP)
                row = {"workload": workload.name, "rate": rate, "seed": seed, "requests": len(asks)}
                row |= {"source": source or "none", "use": use}
                row |= {"latency": outcome.latency, "preemptions": outcome.preemptions}
                rows.append(row)
                told = f"{workload.name}, {rate:g}/s, seed {seed}, {source}, {use}"
                say(f"{told}: {outcome.latency:.4f} s, {outcome.preemptions}")
    return rows
