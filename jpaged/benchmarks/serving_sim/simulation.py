"""Runs a policy against requests that arrive over time: discrete events, each a step of the scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jpaged.benchmarks.serving_sim.beams import MadeUpRankings
from jpaged.benchmarks.serving_sim.machine import Machine, mean
from jpaged.benchmarks.serving_sim.policies import Job, Policy
from jpaged.benchmarks.serving_sim.workload import Ask
from jpaged.scheduling import ScheduledStep

Watch = Callable[[Policy, ScheduledStep, float], None]
"""A function that is shown every step: the policy, the step and the clock after it."""


@dataclass(frozen=True)
class Outcome:
    """Holds what one simulation gave.

    Attributes:
        jobs: the requests that ended.
        seconds: from the first arrival to the last end.
        batch: mean running requests, weighted by time, while requests arrived; of the whole run where all came at once.
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
        """Return the normalised latency: seconds from arrival to end for each token of an output, mean of requests."""
        if self.gave_up:
            return float("inf")
        return mean((job.finished - job.ask.arrival) / job.ask.output for job in self.jobs if job.finished is not None)

    @property
    def throughput(self) -> float:
        """Return requests a second."""
        return len(self.jobs) / self.seconds if self.seconds else 0.0

    @property
    def first_token(self) -> float:
        """Return the mean seconds to the first token."""
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
) -> Outcome:
    """Serve `asks`, which are in order of arrival, and return what became of them.

    Args:
        watch: is shown every step.
        rankings: makes up the likely tokens of beams; needed where there are beams that share.
        most_waiting: the run ends where more requests wait, as its latency is beyond all interest; None = no bound.

    Raises:
        RuntimeError: requests wait although nothing runs.
    """
    clock, coming, steps, decodes, decoding = 0.0, 0, 0, 0, 0
    jobs = [Job(ask) for ask in asks]
    done: list[Job] = []
    start, last_arrival = (asks[0].arrival, asks[-1].arrival) if asks else (0.0, 0.0)
    if last_arrival == start:
        last_arrival = math.inf  # all are there from the start: their batch is that of the whole run
    area = 0.0
    scheduler, gave_up = policy.scheduler, False
    while coming < len(jobs) or policy.has_work:
        while coming < len(jobs) and jobs[coming].ask.arrival <= clock:
            policy.arrive(jobs[coming])
            coming += 1
        step = policy.schedule()
        if not step.chunks:
            if coming == len(jobs):
                if not policy.has_work:
                    break
                raise RuntimeError(f"{policy.name}: {len(scheduler.waiting)} requests wait although nothing runs")
            clock = max(clock, jobs[coming].ask.arrival)
            continue
        scheduler.dispatched(step)
        seconds = machine.seconds(step) + policy.extra_seconds(step, machine)
        if clock <= last_arrival:
            area += seconds * len(scheduler.running)
        clock += seconds
        steps += 1
        samples = step.samples
        if len(samples) == len(step.chunks):
            decodes += len(samples)
            decoding += 1
        fresh = [sample.request for sample in samples if sample.request.first_token_time is None]
        top = rankings.of(step) if rankings is not None else None
        ended = scheduler.update(step, [0] * len(samples), [0.0] * len(samples), top)
        for request in fresh:
            job = policy.jobs[request.request_id]
            job.first_token = clock
        if ended:
            done += policy.ended(ended, clock)
        if watch is not None:
            watch(policy, step, clock)
        if most_waiting is not None and len(scheduler.waiting) > most_waiting:
            gave_up = True
            break
    return Outcome(
        policy.name,
        done,
        clock - start,
        area / max(min(clock, last_arrival) - start, 1e-9),
        decodes / max(1, decoding),
        steps,
        scheduler.num_preemptions,
        policy.refused,
        gave_up,
    )
