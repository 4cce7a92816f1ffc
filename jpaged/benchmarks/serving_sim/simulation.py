"""Runs a policy against requests that arrive over time: discrete events, each a step of the scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jpaged.benchmarks.serving_sim.beams import MadeUpRankings
from jpaged.benchmarks.serving_sim.coasting import Coast, is_level
from jpaged.benchmarks.serving_sim.machine import BytesPerToken, Machine, mean
from jpaged.benchmarks.serving_sim.policy import Job, Policy
from jpaged.benchmarks.serving_sim.workload import Ask
from jpaged.scheduling import ScheduledStep
from jpaged.scheduling.top_tokens import TopTokens

Watch = Callable[[Policy, ScheduledStep, float], None]
"""A function that is shown every step: the policy, the step and the clock after it."""


@dataclass(frozen=True)
class Outcome:
    """Holds what one simulation gave.

    Attributes:
        jobs: the requests that ended, without those that came while the run warmed up.
        seconds: from the end of the warm-up, or the first arrival where there is none, to the last end.
        batch: mean running requests, weighted by time, from the warm-up to the last arrival; of the whole run where all
            came at once.
        decode_batch: mean sequences that got a token in a step of decodes.
        steps: number of steps.
        preemptions: how often a request's memory was taken back.
        refused: requests that the memory could never hold.
        gave_up: whether the run was ended because too many waited.
    """

    name: str
    jobs: list[Job]
    seconds: float
    batch: float
    decode_batch: float
    steps: int
    preemptions: int
    refused: int
    gave_up: bool = False

    @property
    def latency(self) -> float:
        """Return the normalised latency: seconds from arrival to end for each token of an output, mean of requests;
        infinite where none ended, too many waited, or one was refused, as a mean without it would reward that."""
        if self.gave_up or self.refused or not self.jobs:
            return math.inf
        return mean((job.finished - job.ask.arrival) / job.ask.output for job in self.jobs if job.finished is not None)

    @property
    def throughput(self) -> float:
        """Return requests a second."""
        return len(self.jobs) / self.seconds if self.seconds else 0.0

    @property
    def first_token(self) -> float:
        """Return the mean seconds to the first token; infinite where no request ended."""
        if not self.jobs:
            return math.inf
        return mean(job.first_token - job.ask.arrival for job in self.jobs if job.first_token is not None)

    @property
    def token_seconds(self) -> float:
        """Return the mean seconds between two tokens of a request."""
        return mean(
            (job.finished - job.first_token) / (job.ask.output - 1)
            for job in self.jobs
            if job.finished is not None and job.first_token is not None and job.ask.output > 1
        )


def simulate(
    policy: Policy,
    machine: Machine,
    asks: Sequence[Ask],
    *,
    watch: Watch | None = None,
    rankings: MadeUpRankings | None = None,
    most_waiting: int | None = None,
    warm_up: float = 0.0,
    coasts: bool = True,
) -> Outcome:
    """Serve `asks`, which are in order of arrival, and return what became of them.

    Args:
        watch: is shown every step.
        rankings: makes up the likely tokens of beams; needed where there are beams that share.
        most_waiting: the run ends where more requests wait, as its latency is beyond all interest; None = no bound.
        warm_up: share of the time from the first to the last arrival in which the queue and the batch build up: who
            comes then is served, but not counted.
        coasts: whether steps in which nothing happens are run without planning each, which changes no number.

    Raises:
        RuntimeError: requests wait although nothing runs.
    """
    run = _Run(policy, machine, asks, most_waiting, warm_up)
    coasts = coasts and policy.steady and watch is None and rankings is None
    coasts = coasts and isinstance(machine.kv_bytes, BytesPerToken)
    while not run.gave_up and (run.coming < len(run.jobs) or policy.has_work):
        run.take_arrivals()
        step = policy.schedule()
        if not step.chunks:
            if not run.await_arrival():
                break
            continue
        run.take(step, rankings.of(step) if rankings is not None else None)
        if watch is not None:
            watch(policy, step, run.clock)
        if coasts and not run.gave_up and is_level(step, policy.scheduler):
            run.coast()
    return run.outcome()


class _Run:
    """Keeps the clock and the counts of one simulation.

    Attributes:
        jobs: all requests; those from `coming` on have not arrived.
    """

    def __init__(
        self, policy: Policy, machine: Machine, asks: Sequence[Ask], most_waiting: int | None, warm_up: float
    ) -> None:
        self.policy, self.machine = policy, machine
        self.jobs = [Job(ask) for ask in asks]
        self.coming = 0
        self.clock = 0.0
        self.gave_up = False
        self._done: list[Job] = []
        self._most_waiting = math.inf if most_waiting is None else most_waiting
        first, self._last_arrival = (asks[0].arrival, asks[-1].arrival) if asks else (0.0, 0.0)
        self._start = first + warm_up * (self._last_arrival - first)
        if self._last_arrival == first:
            self._last_arrival = math.inf  # all are there from the start: their batch is that of the whole run
        self._area = 0.0
        self._steps = self._decodes = self._decoding = 0

    @property
    def _is_due(self) -> bool:
        """Tell whether a request has arrived that was not told to the policy."""
        return self.coming < len(self.jobs) and self.jobs[self.coming].ask.arrival <= self.clock

    def take_arrivals(self) -> None:
        """Tell the policy of the requests that have arrived."""
        while self._is_due:
            self.policy.arrive(self.jobs[self.coming])
            self.coming += 1

    def await_arrival(self) -> bool:
        """Let time pass until the next request arrives, as nothing can run before; return False when all is done."""
        if self.coming < len(self.jobs):
            self.clock = max(self.clock, self.jobs[self.coming].ask.arrival)
            return True
        if self.policy.has_work:
            number = self.policy.num_waiting
            raise RuntimeError(f"{self.policy.name}: {number} requests wait although nothing runs")
        return False

    def take(self, step: ScheduledStep, top: TopTokens | None) -> None:
        """Let a step pass and take its tokens."""
        policy, samples = self.policy, step.samples
        policy.scheduler.dispatched(step)
        seconds = self.machine.seconds(step) + policy.extra_seconds(step, self.machine)
        self._pass(seconds, len(samples) if len(samples) == len(step.chunks) else 0)
        fresh = [sample.request for sample in samples if sample.request.first_token_time is None]
        ended = policy.scheduler.update(step, [0] * len(samples), [0.0] * len(samples), top)
        for request in fresh:
            policy.jobs[request.request_id].first_token = self.clock
        if ended:
            self._done += policy.ended(ended, self.clock)
        self._look_at_queue()

    def coast(self) -> None:
        """Let steps pass in which nothing but decodes can happen, until a request arrives that may come in, or one may
        that waits, as a sequence has ended."""
        while self._coast_to_an_end() and not (self.gave_up or self.policy.closed):
            pass

    def _coast_to_an_end(self) -> bool:
        """Let steps pass until a sequence ends; return False where it did not come to that.

        Where nobody can come in before, requests arrive meanwhile; else the first arrival ends it.
        """
        closed, policy = self.policy.closed, self.policy
        if self._is_due and not closed:
            return False
        batch = Coast(policy.scheduler)
        while batch.left > 0 and not self.gave_up:
            if self._is_due:
                if not closed:
                    break
                self.take_arrivals()
            seconds = self.machine.decode_seconds(batch.sequences, self.machine.kv_bytes(batch.seen))
            if not batch.step():
                break
            self._pass(seconds, batch.sequences)
            self._look_at_queue()
        ends = batch.sequences > 0 and not batch.left
        if ended := batch.settle():
            self._done += policy.ended(ended, self.clock)
        return ends

    def _pass(self, seconds: float, decodes: int) -> None:
        """Let the time of a step pass, which gives so many sequences a token if it is one of decodes."""
        if self._start <= self.clock <= self._last_arrival:
            self._area += seconds * len(self.policy.scheduler.running)
        self.clock += seconds
        self._steps += 1
        if decodes:
            self._decodes += decodes
            self._decoding += 1

    def _look_at_queue(self) -> None:
        self.gave_up = self.policy.num_waiting > self._most_waiting

    def outcome(self) -> Outcome:
        """Return what the run gave."""
        clock, start, scheduler = self.clock, self._start, self.policy.scheduler
        return Outcome(
            self.policy.name,
            [job for job in self._done if job.ask.arrival >= start],
            max(0.0, clock - start),
            self._area / max(min(clock, self._last_arrival) - start, 1e-9),
            self._decodes / max(1, self._decoding),
            self._steps,
            scheduler.num_preemptions,
            self.policy.refused,
            self.gave_up,
        )
