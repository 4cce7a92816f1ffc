"""A further kind of hold is one `Held` in `KINDS`: it is taken, counted and released everywhere, where the pool has a
layer group for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_device import FakeDevice, Loop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone, hash_model

from jpaged.memory import GroupSpec, NoTable
from jpaged.memory.saving import load_memory, memory_data
from jpaged.scheduling import Request, ScheduledStep, Status
from jpaged.scheduling.held import KINDS, Held
from jpaged.scheduling.saving import load_request, request_data
from jpaged.scheduling.step import StepPlan


@dataclass(frozen=True)
class Scratch(NoTable):
    """Blocks that each request has to itself."""

    kind = "scratch"


class ScratchHolds(Held):
    """Every request that asks for numbers of scratch space holds blocks for them while it runs."""

    kind = saved_name = Scratch.kind

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.num_taken = self.num_dispatched = 0

    def lifetime(self, request: Request) -> int:
        return self.blocks.num_blocks(request.asks[self.kind])

    def outstanding(self, request: Request) -> int:
        return 0 if self.kind in request.held else self.lifetime(request)

    def reclaimed(self, victim: Request, request: Request) -> list[int]:
        return victim.held[self.kind].blocks if self.kind in victim.held else []

    def hold(self, request: Request) -> bool:
        if self.kind not in request.held:
            held = self.blocks.hold(request.request_id.to_bytes(8, "little"), request.asks[self.kind])
            if held is None:
                return False
            request.held[self.kind] = held
            self.num_taken += 1
        return True

    def release(self, request: Request) -> None:
        if self.kind in request.held:
            self.blocks.release(request.held.pop(self.kind))

    def rows(self, request: Request, chunks) -> list[tuple[int, list[int]]]:
        return [(chunk.seq.seq_id, request.held[self.kind].blocks) for chunk in chunks]

    def take(self, plan: StepPlan) -> None:
        self.blocks.take_pending()
        asking = [sample.chunk.seq.seq_id for sample in plan.samples if sample.request.asks]
        assert {seq_id for seq_id, _ in plan.rows.get(self.kind, ())} >= set(asking), "a sequence runs without the hold"

    def dispatched(self, step: ScheduledStep) -> None:
        self.num_dispatched += 1

    @classmethod
    def data(cls, request: Request, arrays) -> int | None:
        return request.asks.get(cls.kind)

    @classmethod
    def load(cls, data: int | None, arrays) -> int | None:
        return data


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(KINDS, Scratch.kind, ScratchHolds)
    yield


GROUPS = [group("full"), GroupSpec("scratch", 8, 1, 4, Scratch())]
"""Blocks of tokens and of scratch space have the size of a large page."""


def asking(request: Request, number: int = 7) -> Request:
    request.asks[Scratch.kind] = number
    return request


def loop_of(num_blocks: int, **options) -> Loop:
    return Loop(make_scheduler(num_blocks, groups=GROUPS, **options))


def holds_of(loop: Loop) -> ScratchHolds:
    return loop.scheduler.allocation.holds._kinds[Scratch.kind]


def check(loop: Loop, requests: list[Request]) -> None:
    for request in requests:
        for seq in request.sequences:
            assert seq.output_token_ids == alone(request, [group()], index=seq.index)[0]
        assert not request.held
    assert loop.num_used_blocks == 0


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 12), st.integers(1, 3), st.booleans()), min_size=2, max_size=6
    ),
    mode=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
)
def test_a_third_kind_is_held_while_a_request_runs_and_no_longer(asked, mode, policy, prefix_caching):
    loop = loop_of(24, preemption_mode=mode, policy=policy, prefix_caching=prefix_caching, swap_blocks=12)
    requests = []
    for i, (length, most, width, asks) in enumerate(asked):
        made = make_request(range(length), most, width=width, priority=i % 2 if policy == "priority" else None)
        requests.append(asking(made) if asks else made)
    steps = loop.run(*requests)
    assert holds_of(loop).num_taken >= sum(bool(request.asks) for request in requests)
    assert holds_of(loop).num_dispatched == len(steps)
    check(loop, requests)


def leave_by_abort(loop: Loop, request: Request) -> None:
    loop.scheduler.abort(request)


def leave_by_restart(loop: Loop, request: Request) -> None:
    loop.in_flight = None
    loop.scheduler.restart()
    loop.device = FakeDevice(loop.scheduler.memory.layout, hash_model)


@pytest.mark.parametrize("leave", [leave_by_abort, leave_by_restart])
def test_a_third_kind_is_released_by(leave: Callable[[Loop, Request], None]):
    loop = loop_of(16)
    loop.scheduler.add(request := asking(make_request(5, 6)))
    loop.step()
    assert request.held and loop.num_used_blocks == 2 + 2
    leave(loop, request)
    assert not request.held and loop.num_used_blocks == 0
    loop.run(again := asking(make_request(5, 6)))
    check(loop, [again])


def test_admission_counts_the_blocks_of_a_third_kind():
    loop = loop_of(8)
    steps = loop.run(*(asking(make_request(8, 4), 8) for _ in range(2)))
    assert max(len(step.chunks) for step in steps) == 2 and loop.scheduler.num_preemptions > 0
    loop = loop_of(7)
    steps = loop.run(*(asking(make_request(8, 4), 8) for _ in range(2)))
    assert max(len(step.chunks) for step in steps) == 1 and loop.scheduler.num_preemptions == 0


def test_a_request_that_could_never_fit_with_what_it_holds_is_refused():
    loop_of(5).run(asking(make_request(8, 4), 8))
    with pytest.raises(ValueError, match="can never fit the pool of 4 large pages"):
        loop_of(4).scheduler.add(asking(make_request(8, 4), 8))


def test_a_pool_has_the_kinds_of_its_layer_groups_and_a_text_model_has_none(monkeypatch):
    text = make_scheduler()
    assert not text.memory.shared
    with pytest.raises(ValueError, match="the request asks for scratch, which no layer group of the model keeps"):
        text.add(asking(make_request(3)))
    with pytest.raises(ValueError, match="which no layer group of the model keeps"):
        text.admission.lifetime(asking(make_request(3)))  # of a restored request, which no one adds
    monkeypatch.delitem(KINDS, Scratch.kind)
    with pytest.raises(ValueError, match=r"keeps scratch, and \['adapters', 'images'\] are known"):
        loop_of(4)


def test_a_restored_request_without_room_for_what_it_held_is_computed_again(monkeypatch):
    loop = loop_of(16)
    loop.scheduler.add(request := asking(make_request(5, 6)))
    loop.step()
    loop.drain()
    saved, memory = request_data(request, 0.0), memory_data(loop.scheduler.memory)
    assert saved["scratch"] == 7 and memory["shared"]["scratch"]["held"]
    new = loop_of(16)
    load_memory(new.scheduler.memory, memory)
    monkeypatch.setattr(ScratchHolds, "hold", lambda *args: False)
    new.scheduler.restore(again := load_request(saved, 0.0))
    monkeypatch.undo()
    monkeypatch.setitem(KINDS, Scratch.kind, ScratchHolds)
    assert again.status is Status.WAITING and again.asks == request.asks and new.num_used_blocks == 0
    new.run()
    check(new, [again])


@pytest.mark.parametrize("forgotten", [None, "_forget", "take_back", "place"])
def test_a_forgotten_release_is_found(forgotten, monkeypatch):
    """Each place that ends all holds of a request is needed: without it a request keeps blocks that does not run."""
    loop = loop_of(9)
    allocation, holds = loop.scheduler.allocation, loop.scheduler.allocation.holds
    release, allocate, callers = holds.release, allocation.allocate, set()
    requests = [asking(make_request(8, 6), 8) for _ in range(3)]
    scattered = iter([requests[1].sequences[0]])  # there is room for it, and once it does not get its blocks

    def release_elsewhere(request: Request) -> None:
        callers.add(sys._getframe(1).f_code.co_name)
        if forgotten not in callers:
            release(request)

    def allocate_later(seq, *args):
        return None if seq is requests[1].sequences[0] and next(scattered, None) else allocate(seq, *args)

    monkeypatch.setattr(holds, "release", release_elsewhere)
    monkeypatch.setattr(allocation, "allocate", allocate_later)
    with nullcontext() if forgotten is None else pytest.raises(AssertionError):
        loop.run(*requests, most_steps=200)
        check(loop, requests)
    assert callers == {"_forget", "take_back", "place"} if forgotten is None else forgotten in callers


SCHEDULING = Path(__file__).parents[3] / "jpaged" / "scheduling"
FILES = [
    *(file for file in sorted(SCHEDULING.glob("*.py")) if file.stem not in ("inputs", "step", "work")),
    SCHEDULING.parent / "memory" / "capacity.py",
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_schedules_names_no_kind(file):
    text = file.read_text(encoding="utf-8").lower()
    assert "image" not in text and "adapter" not in text
