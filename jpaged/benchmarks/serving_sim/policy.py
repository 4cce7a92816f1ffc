"""What serves a simulated workload: the real scheduler over a memory, and the requests it makes of what arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, cast

from jpaged.benchmarks.serving_sim.workload import Ask
from jpaged.memory import MemoryManager
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.scheduling import BeamSearch, PreemptionMode, Request, ScheduledStep, Scheduler
from jpaged.scheduling import Sequence as Stream

MAX_NUM_SEQS = 1024
BUDGET = 2560
"""Most tokens of a step, as vLLM's was."""


@dataclass(eq=False)
class Job:
    """Follows one request through the simulation.

    Attributes:
        open: its requests to the scheduler that have not ended: one, or as many as outputs where these are not shared.
        first_token, finished: seconds; None before.
    """

    ask: Ask
    open: int = 0
    first_token: float | None = None
    finished: float | None = None


class Policy:
    """Serves requests by the scheduler over a memory: the interface of all policies, and iteration-level batching.

    Args:
        name: what tables call it.
        memory: what the scheduler is given.
        shares: whether several outputs of a prompt are one request that shares its blocks; else each is a request.
        steady: whether a sequence that decodes does nothing to the memory but take blocks, see `Coast`.

    Attributes:
        jobs: the job of each request to the scheduler, by its id.
        refused: requests that the memory could never hold.
    """

    def __init__(
        self,
        name: str,
        memory: Any,
        *,
        shares: bool = True,
        steady: bool = False,
        preemption_mode: PreemptionMode = "recompute",
        max_num_seqs: int = MAX_NUM_SEQS,
        budget: int = BUDGET,
        image_tokens: int = 0,
        shift: int = 0,
        fits: Callable[[int], bool] | None = None,
    ) -> None:
        self.name = name
        self.memory = memory
        self.shares = shares
        self.steady = steady
        self.scheduler = Scheduler(
            cast(MemoryManager, memory),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            preemption_mode=preemption_mode,
        )
        self.jobs: dict[int, Job] = {}
        self.refused = 0
        self._image_tokens = image_tokens
        self.shift = shift
        self._fits = fits
        self._ids = count()

    @property
    def has_work(self) -> bool:
        """Tell whether a request has not ended."""
        return self.scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait to be let in."""
        return len(self.scheduler.waiting)

    @property
    def closed(self) -> bool:
        """Tell whether a request that comes now has to wait until another one has ended."""
        return bool(self.scheduler.waiting or self.scheduler.swapped)

    def arrive(self, job: Job) -> None:
        """Take a request that has come."""
        self._add(job)

    def schedule(self) -> ScheduledStep:
        """Plan the next step."""
        return self.scheduler.schedule()

    def extra_seconds(self, step: ScheduledStep, machine: Any) -> float:
        """Return what a step costs this policy beside what any would compute."""
        return 0.0

    def ended(self, requests: list[Request], now: float) -> list[Job]:
        """Return the jobs that end as these requests have."""
        jobs = []
        for request in requests:
            job = self.jobs.pop(request.request_id)
            job.open -= 1
            if not job.open:
                job.finished = now
                jobs.append(job)
        return jobs

    def _add(self, job: Job) -> None:
        ask = job.ask
        parts = [ask.n] if self.shares else [1] * ask.n
        job.open = len(parts)
        added: list[Request] = []
        for width in parts:
            request = self._request(ask, width)
            self._told(request, ask)
            try:
                if self._fits is not None and not self._fits(request.sequences[0].seq_id):
                    raise ValueError(f"a request of {ask.prompt} + {ask.output} tokens can never fit")
                self.scheduler.add(request)
            except ValueError:
                self.refused += 1
                job.open = 0
                for other in added:
                    self.scheduler.abort(other)
                return
            added.append(request)
        for request in added:
            self.jobs[request.request_id] = job

    def _told(self, request: Request, ask: Ask) -> None:
        """Note what the memory has to know of a request before it is added."""

    def _request(self, ask: Ask, width: int) -> Request:
        tokens = list(ask.tokens) or [0] * ask.prompt
        if self.shift:
            tokens = [*range(-self.shift, 0), *tokens]
        seq_ids = [next(self._ids) for _ in range(width)]
        beam = None
        if ask.beams and self.shares:
            wanted = BeamSearchParams(beam_width=width, max_tokens=ask.output, ignore_eos=True)
            beam = BeamSearch(wanted, ask.output, frozenset())
        return Request(
            request_id=seq_ids[0],
            prompt_token_ids=tokens,
            params=_params(ask.output),
            seed=0,
            max_total_tokens=len(tokens) + ask.output,
            stop_ids=frozenset(),
            eos_ids=frozenset(),
            sequences=[Stream(seq_id, i, list(tokens), len(tokens)) for i, seq_id in enumerate(seq_ids)],
            beam=beam,
            encoder_tokens=self._image_tokens,
        )


@cache
def _params(output: int) -> SamplingParams:
    """Return the parameters of all requests with so many tokens of output; nobody changes them."""
    return SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
