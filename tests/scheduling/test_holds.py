"""A further kind of hold is one `Held` that the scheduler is given: it is taken, counted and released everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_device import FakeDevice, Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone, hash_model

from jpaged.scheduling import Request, ScheduledStep, Scheduler
from jpaged.scheduling.holds import Held
from jpaged.scheduling.step import StepPlan


class ScratchHolds(Held):
    """Every request holds some blocks while it runs, as a sequence that never does.

    Attributes:
        held: the requests that hold blocks.
        num_taken: how often blocks were taken.
    """

    def __init__(self, num_tokens: int) -> None:
        self.held: dict[Request, int] = {}
        self.num_taken = self.num_dispatched = 0
        self._num_tokens = num_tokens
        self.memory = None

    def outstanding(self, request: Request) -> list[int] | None:
        return None if request in self.held else [-(-self._num_tokens // 4)]

    def hold(self, request: Request) -> bool:
        if request in self.held:
            return True
        key = -1 - request.request_id
        self.memory.add(key, key)
        if self.memory.allocate(key, self._num_tokens, first_write=0) is None:
            self.memory.free(key)
            return False
        self.held[request] = key
        self.num_taken += 1
        return True

    def release(self, request: Request) -> None:
        if request in self.held:
            self.memory.free(self.held.pop(request))

    def take(self, plan: StepPlan) -> None:
        for seq in (sample.seq for sample in plan.samples):
            assert any(seq in request.sequences for request in self.held), "a sequence runs without the hold"

    def dispatched(self, step: ScheduledStep) -> None:
        self.num_dispatched += 1

    def clear(self) -> None:
        self.held.clear()


def loop_of(num_blocks: int, holds: ScratchHolds, **options) -> Loop:
    made = make_scheduler(num_blocks, **options)
    holds.memory = made.memory
    names = ("max_num_seqs", "max_num_batched_tokens", "policy")
    kept = {name: getattr(made, name) for name in names} | {"preemption_mode": made.preemption.mode}
    return Loop(Scheduler(made.memory, **kept, holds=[holds]))


def check(loop: Loop, holds: ScratchHolds, requests: list[Request]) -> None:
    for request in requests:
        for seq in request.sequences:
            assert seq.output_token_ids == alone(request, [group()], index=seq.index)[0]
    assert not holds.held and loop.num_used_blocks == 0


@settings(max_examples=examples(60), deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12), st.integers(1, 3)), min_size=2, max_size=6),
    mode=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
)
def test_a_third_kind_is_held_while_a_request_runs_and_no_longer(asked, mode, policy, prefix_caching):
    holds = ScratchHolds(num_tokens=7)
    options = {"preemption_mode": mode, "policy": policy, "prefix_caching": prefix_caching, "swap_blocks": 12}
    loop = loop_of(24, holds, **options)
    requests = [
        make_request(range(length), most, width=width, priority=i % 2 if policy == "priority" else None)
        for i, (length, most, width) in enumerate(asked)
    ]
    steps = loop.run(*requests)
    assert holds.num_taken >= len(requests) and holds.num_dispatched == len(steps)
    check(loop, holds, requests)


def leave_by_abort(loop: Loop, request: Request) -> None:
    loop.scheduler.abort(request)


def leave_by_restart(loop: Loop, request: Request) -> None:
    loop.in_flight = None
    loop.scheduler.restart()
    loop.device = FakeDevice(loop.scheduler.memory.layout, hash_model)


@pytest.mark.parametrize("leave", [leave_by_abort, leave_by_restart])
def test_a_third_kind_is_released_by(leave: Callable[[Loop, Request], None]):
    loop = loop_of(16, holds := ScratchHolds(num_tokens=7))
    loop.scheduler.add(request := make_request(5, 6))
    loop.step()
    assert holds.held and loop.num_used_blocks == 2 + 2
    leave(loop, request)
    assert not holds.held and loop.num_used_blocks == 0
    loop.run(again := make_request(5, 6))
    check(loop, holds, [again])


def test_admission_counts_the_blocks_of_a_third_kind():
    loop = loop_of(8, ScratchHolds(num_tokens=8))
    steps = loop.run(make_request(8, 4), make_request(8, 4))
    assert max(len(step.chunks) for step in steps) == 2 and loop.scheduler.num_preemptions > 0
    loop = loop_of(7, ScratchHolds(num_tokens=8))
    steps = loop.run(make_request(8, 4), make_request(8, 4))
    assert max(len(step.chunks) for step in steps) == 1 and loop.scheduler.num_preemptions == 0
