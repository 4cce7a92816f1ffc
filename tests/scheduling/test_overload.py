"""A full pool for a long time: host memory, disk, priorities, shared prefixes and cancels together.

Nothing is lost, the order of service is kept, and a step costs as much at the end as at the beginning. Cost is counted
in calls of Python functions, which are the same on every machine.
"""

from __future__ import annotations

import random
import sys
from statistics import mean

import pytest
from fake_device import Loop
from fake_store import FakeStore
from small_schedulers import group, make_request, make_scheduler
from unpaged import alone

from jpaged.scheduling import Status
from jpaged.scheduling.queues import service_order

STEP = 0.1
"""Seconds of the simulated clock that a step takes: an hour has 36,000, of 2 to 3 ms of a core each."""
GROUPS = [
    group("full", block_size=2, layer_bytes=3),
    group("window", window=5, block_size=2, layer_bytes=2),
    group("state", interval=6, block_size=2, layer_bytes=9),
]
WAITING, WINDOW = 24, 150


class Overload:
    """Keeps a scheduler's queue full of drawn requests, some of which are cancelled, and looks at every step."""

    def __init__(self, mode: str, seed: int, *, check_every: int) -> None:
        self.rng, self.check_every = random.Random(seed), check_every
        self.ram, self.disk = FakeStore(), FakeStore(delay=2)
        self.scheduler = make_scheduler(
            20,
            groups=GROUPS,
            policy="priority",
            preemption_mode=mode,
            prefix_caching=True,
            swap_blocks=6 if mode == "swap" else 0,
            ram=self.ram,
            ram_pages=15,
            disk=self.disk,
            disk_pages=60,
            max_num_seqs=6,
            budget=24,
        )
        self.loop = Loop(self.scheduler)
        self.check, self.loop.check = self.loop.check, lambda step: None
        self.running: dict[int, object] = {}
        self.cancelled: set[int] = set()
        self.accepted = self.ended = self.preempted = self.restored = self.steps = 0
        self.calls: dict[int, int] = {}

    def arrive(self) -> None:
        """Add a request: one of five beginnings, a few tokens of its own, one of three priorities."""
        beginning, own = self.rng.randrange(5), self.rng.randint(1, 12)
        prompt = [(beginning * 7 + i) % 97 for i in range(self.rng.randint(4, 20))]
        prompt += [self.rng.randrange(100, 200) for _ in range(own)]
        request = make_request(prompt, self.rng.randint(1, 20), priority=self.rng.randrange(3))
        self.scheduler.add(request)
        self.running[request.request_id] = request
        self.accepted += 1

    def cancel(self) -> None:
        """Cancel a request, whatever it does."""
        request = self.rng.choice(self.scheduler.requests)
        self.cancelled.add(request.request_id)
        self.scheduler.abort(request)

    def step(self, *, counts: bool = False) -> None:
        before = set(map(id, self.scheduler.waiting))
        count = 0

        def profile(frame, event, arg):
            nonlocal count
            count += event == "call" and "/jpaged/" in frame.f_code.co_filename

        sys.setprofile(profile if counts else None)
        try:
            step = self.loop.step()
        finally:
            sys.setprofile(None)
        self.calls[self.steps] = count
        self.steps += 1
        self.preempted += len(step.preempted)
        admitted = [r for r in self.scheduler.running if id(r) in before]
        left = [r for r in self.scheduler.waiting if id(r) in before and r not in step.preempted]
        if admitted and left:
            assert max(map(service_order, admitted)) < min(map(service_order, left)), "a request was overtaken"
        if self.steps % self.check_every == 0:
            self.check(step)
        self.take_ended()

    def take_ended(self) -> None:
        """Compare what ended with what each request gets alone."""
        for request in self.loop.finished:
            del self.running[request.request_id]
            (seq,) = request.sequences
            assert (seq.output_token_ids, seq.finish_reason) == alone(request, GROUPS)
            self.ended += 1
        self.loop.finished.clear()
        for request_id in [i for i in self.cancelled if i in self.running]:
            request = self.running[request_id]
            if request.status is Status.FINISHED:
                del self.running[request_id]
                (seq,) = request.sequences
                assert seq.output_token_ids == alone(request, GROUPS)[0][: seq.num_output]
                self.ended += 1

    def run(self, seconds: float) -> None:
        """Serve for so long on the simulated clock, then until nothing is left."""
        steps = round(seconds / STEP)
        early, late = range(WINDOW, 2 * WINDOW), range(steps - WINDOW, steps)
        for number in range(steps):
            while len(self.scheduler.waiting) < WAITING:
                self.arrive()
            if self.rng.random() < 0.05:
                self.cancel()
            self.step(counts=number in early or number in late)
        while self.scheduler.has_work or self.loop.in_flight is not None:
            self.step()
        assert not self.running and self.ended == self.accepted, "a request was lost"
        assert self.loop.num_used_blocks == 0
        assert self.preempted and self.cancelled and self.ram.num_read and self.disk.num_read
        first, last = (mean(self.calls[number] for number in window) for window in (early, late))
        assert last < 1.2 * first, f"a step takes {last:.0f} calls, not {first:.0f} as at first"


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_full_pool_loses_nothing_keeps_its_order_and_its_cost(mode):
    Overload(mode, 0, check_every=50).run(60)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_hour_of_overload(mode):
    Overload(mode, 1, check_every=1000).run(3600)
