"""An exception at any acquire or release: `restart` leaves nothing held, and every request gets its tokens.

The memory is given to the scheduler in a wrapper that raises at the n-th acquire or release, once before it is made and
once after it was made, when the caller never learns of it. At night every n of each workload is tried; on a commit the
first of each method, its last, and every fourth between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import thorough
from arrivals import Arrival
from fake_device import FakeDevice, Loop
from fake_store import FakeStore
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from test_adapters import adapter
from test_encoding import with_images
from thorough import examples
from unpaged import hash_model

from jpaged.memory import Adapters, GroupSpec, ImageFeatures, PinnedSequences
from jpaged.sampling_params import BeamSearchParams
from jpaged.scheduling import Request, Scheduler, Status, tier_prefetch
from jpaged.scheduling.inputs import asks_for

PREFIX = [2, 7, 1, 8, 2, 8, 1, 8, 2]
NUM_ROWS = 4

SEQUENCES = "add admitted match_prefix allocate commit dispatched fork free pack pin read_ahead"
WHOLES = "hold release take_pending encoded"
STEPS = {
    "": SEQUENCES,
    "images": f"{WHOLES} consumed",
    "adapters": f"{WHOLES} forget",
    "swap_space": "move_out move_in take_dropped",
    "tiers": "begin_step take_writes take_fills",
    "prefetch": "waits_for let_go",
}
"""Methods that acquire and release, by the part of the memory that does it; "" is the memory itself."""


class Fault(Exception):
    """Stands for what may come at any moment."""


class Faults:
    """Counts the points at which an acquire or a release can fail, and fails at some of them.

    Args:
        fail_at: numbers of these points.
    """

    def __init__(self, *fail_at: int) -> None:
        self.passed: list[str] = []
        self._fail_at = frozenset(fail_at)

    def pass_point(self, name: str) -> None:
        self.passed.append(name)
        if len(self.passed) - 1 in self._fail_at:
            raise Fault(name)

    def around(self, name: str, call: Callable) -> Callable:
        def watched(*args, **kwargs):
            self.pass_point(f"before {name}")
            result = call(*args, **kwargs)
            self.pass_point(f"after {name}")
            return result

        return watched


class FailingMemory:
    """A memory, or a part of one, whose acquires and releases fail where `faults` says."""

    def __init__(self, target: object, part: str, faults: Faults) -> None:
        self._target = target
        self._part = part
        self._steps = STEPS[part].split()
        self._faults = faults
        assert all(hasattr(target, step) for step in self._steps)

    def __getattr__(self, name: str):
        found = getattr(self._target, name)
        if name == "shared":
            return {kind: FailingMemory(blocks, kind, self._faults) for kind, blocks in found.items()}
        if name in STEPS and found is not None:
            return FailingMemory(found, name, self._faults)
        return self._faults.around(f"{self._part} {name}".strip(), found) if name in self._steps else found


class FailingRows(list):
    """Free rows of the batch whose acquire and release fail where `faults` says."""

    def __init__(self, rows: list[int], faults: Faults) -> None:
        super().__init__(rows)
        self.pop = faults.around("pop a row", super().pop)
        self.append = faults.around("append a row", super().append)


class Workload(NamedTuple):
    """Requests over a small pool.

    Attributes:
        options: of `make_scheduler`.
        arrivals: makes the requests anew.
        pins: whether `PREFIX` is pinned while they run.
    """

    options: Callable[[], dict[str, object]]
    arrivals: Callable[[], list[Arrival]]
    pins: bool = False


def with_adapter(request: Request, name: str) -> Request:
    request.asks |= asks_for(adapter=adapter(name, 2))
    return request


def of_all_kinds(stays: bool) -> list[Arrival]:
    """Images, adapters, several outputs and a beam search, of which some begin alike and one is aborted."""
    return [
        Arrival(0, with_images([3, ("cat", 3), 2], 9, stays=stays), None),
        Arrival(0, with_adapter(make_request(PREFIX, 6), "a"), None),
        Arrival(1, make_request([*PREFIX, 5, 5], 7, width=2), None),
        Arrival(1, with_adapter(make_request([3, 1, 4], 4), "b"), None),
        Arrival(2, with_adapter(with_images([1, ("dog", 4), 2, ("cat", 3)], 6, stays=stays), "a"), 3),
        Arrival(3, make_request([6, 5, 4], beam=BeamSearchParams(2, 4, 0.5)), None),
        Arrival(3, with_images([3, ("cat", 3), 2], 3, stays=stays, width=2), None),
        Arrival(3, with_images([1, ("cow", 12)], 2, whole=False, stays=stays), None),
    ]


def of_one_prompt() -> list[Arrival]:
    """A prompt that the pool loses to others, and is read from disk."""
    prompt = [*PREFIX, *range(8)]
    return [
        Arrival(0, make_request(prompt, 2), None),
        *(Arrival(4, make_request([7 + which] * 6, 8, width=2), None) for which in range(2)),
        Arrival(20, make_request(prompt, 3, width=2), None),
        Arrival(20, make_request([*prompt, 5], 3), None),
        Arrival(21, make_request(prompt, 6), 1),
    ]


def pools(layer_bytes: int, stays: bool, **cost: Any) -> list[GroupSpec]:
    return [
        group("full", layer_bytes=layer_bytes),
        GroupSpec("images", 8, 1, 4, ImageFeatures(stays=stays, **cost)),
        GroupSpec("adapters", 8, 1, 1, Adapters(places=2)),
    ]


SHARED = {"max_num_seqs": NUM_ROWS, "budget": 14, "prefix_caching": True}
WORKLOADS = {
    "recomputed": Workload(
        lambda: {**SHARED, "num_blocks": 8, "groups": pools(4, False)}, lambda: of_all_kinds(stays=False), pins=True
    ),
    "encoded in parts": Workload(
        lambda: {**SHARED, "num_blocks": 8, "groups": pools(4, False, patches="pixels", work=1.2, rounds=(2, 1, 1))},
        lambda: of_all_kinds(stays=False),
    ),
    "swapped": Workload(
        lambda: {**SHARED, "num_blocks": 8, "groups": pools(4, True), "swap_blocks": 8, "preemption_mode": "swap"},
        lambda: of_all_kinds(stays=True),
    ),
    "in tiers": Workload(
        lambda: {
            **SHARED,
            "num_blocks": 9,
            "ram": FakeStore(1),
            "ram_pages": 9,
            "disk": FakeStore(1),
            "swap_blocks": 9,
            "preemption_mode": "swap",
        },
        of_one_prompt,
        pins=True,
    ),
}


class Play:
    """Serves a workload as the engine does, over a memory that fails."""

    def __init__(self, workload: Workload, faults: Faults, **options: object) -> None:
        self.faults = faults
        self.workload = workload
        whole = make_scheduler(**(workload.options() | options))
        self.memory = whole.memory
        names = ("max_num_seqs", "max_num_batched_tokens")
        kept = {name: getattr(whole, name) for name in names} | {"preemption_mode": whole.preemption.mode}
        scheduler = Scheduler(FailingMemory(whole.memory, "", faults), **kept)
        scheduler.allocation.free_rows = FailingRows(scheduler.allocation.free_rows, faults)
        self.loop = Loop(scheduler)
        self.pins = PinnedSequences(scheduler.memory, 1)
        self.num_recovered = 0

    def attempt(self, change: Callable[[], object]) -> bool:
        """Make a change of the state, which is mended where it fails; return whether it was made."""
        try:
            change()
        except Fault:
            self._recover()
            return False
        return True

    def _recover(self) -> None:
        loop, stores = self.loop, self.loop.device.stores
        loop.in_flight = None
        loop.scheduler.restart()
        self.pins.lose()
        loop.device = FakeDevice(self.memory.layout, hash_model)
        loop.device.stores = stores
        self.num_recovered += 1
        self.check_empty()

    def serve(self, *, aborts: bool = True) -> list[Request]:
        """Serve all requests to their ends; return them in order of arrival."""
        scheduler, arrivals = self.loop.scheduler, self.workload.arrivals()
        todo, now = list(arrivals), 0
        if self.workload.pins:
            self._pin()
        while todo or scheduler.has_work or self.loop.in_flight is not None:
            while todo and todo[0].when <= now:
                if self.attempt(lambda: scheduler.add(todo[0].request)):
                    todo.pop(0)
                else:
                    assert todo[0].request not in scheduler.requests, "it was not accepted"
            for when, request, patience in arrivals:
                if aborts and patience is not None and when + patience == now:
                    self.attempt(lambda request=request: scheduler.abort(request))
                    assert request not in scheduler.requests
            self.attempt(self.loop.step)
            now += 1
            assert now < 500, "it does not end"
        if self.workload.pins:
            self._pin()
            if not self.attempt(lambda: self.pins.unpin(0)):
                self.pins.seq_ids.clear()
                self.pins.lost.clear()
        return [request for _, request, _ in arrivals]

    def _pin(self) -> None:
        """Pin the prefix; compute it where it is not there any more."""
        for _ in range(5):
            if 0 in self.pins.seq_ids - self.pins.lost:
                return
            # As long as what follows it is no block, its own blocks are all that is computed.
            if self.attempt(lambda: self.loop.scheduler.add(make_request(PREFIX, 1))):
                while self.loop.scheduler.has_work or self.loop.in_flight is not None:
                    self.attempt(self.loop.step)
                self.attempt(lambda: self.pins.pin(0, PREFIX))
        raise AssertionError("the prefix was not pinned")

    def check_empty(self) -> None:
        """Nothing is held: in the pool, in host memory, on its way from disk, or in the batch."""
        memory, scheduler = self.memory, self.loop.scheduler
        memory.check_invariants()
        report = memory.report()
        assert [found.used for found in report.groups] == [0] * len(report.groups)
        assert not any(blocks.held for blocks in memory.shared.values())
        assert not memory.swap_space.sequences and memory.swap_space.host.used_bytes == 0
        assert sorted(scheduler.allocation.free_rows) == list(range(NUM_ROWS))
        for request in scheduler.requests:
            assert request.status is Status.WAITING and not request.held

    def check_end(self) -> None:
        """Nothing is held, and without its cache the memory is as a new one."""
        self.check_empty()
        assert self.memory.reset_prefix_cache()
        found, fresh = self.memory.report(), make_scheduler(**self.workload.options()).memory.report()
        assert found == fresh


def outputs(requests: list[Request]) -> list[list[tuple[list[int], str | None, float | None]]]:
    return [[(s.output_token_ids, s.finish_reason, s.score) for s in request.sequences] for request in requests]


@cache
def undisturbed(name: str) -> list[list[tuple[list[int], str | None, float | None]]]:
    """The outputs where nothing fails, nothing is aborted and nobody has to give way."""
    return outputs(Play(WORKLOADS[name], Faults(), num_blocks=200).serve(aborts=False))


@cache
def points(name: str) -> list[str]:
    """The acquires and releases of a workload that nothing disturbs."""
    play = Play(WORKLOADS[name], faults := Faults())
    check(play, play.serve(), name)
    return faults.passed


def check(play: Play, requests: list[Request], name: str) -> None:
    for request, expected in zip(requests, undisturbed(name), strict=True):
        assert request.status is Status.FINISHED or request not in play.loop.scheduler.requests
        for (tokens, reason, score), want in zip(outputs([request])[0], expected, strict=True):
            if reason in (None, "abort"):
                assert tokens == want[0][: len(tokens)]
            else:
                assert (tokens, reason, score) == want
    play.check_end()


@pytest.fixture(autouse=True)
def no_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake disk goes on with the device's steps and not with the clock."""
    monkeypatch.setattr(tier_prefetch, "LONGEST_STOP", 0.0)


def test_the_workloads_acquire_and_release_whatever_there_is():
    passed = Counter(point for name in WORKLOADS for point in points(name))
    kinds = [f"{part} {step}".strip() for part, steps in STEPS.items() for step in steps.split()]
    kinds += ["pop a row", "append a row"]
    missing = [kind for kind in kinds if not passed[f"after {kind}"]]
    assert missing == ["adapters forget"], "only where blocks of an adapter lie scattered"


def tried(name: str) -> list[int]:
    """Return the numbers of the points at which a workload fails, in this run of the tests."""
    if thorough.NIGHTLY:
        return list(range(len(points(name))))
    found: dict[str, list[int]] = {}
    for number, point in enumerate(points(name)):
        found.setdefault(point, []).append(number)
    return sorted({number for numbers in found.values() for number in (*numbers[::4], numbers[-1])})


@pytest.mark.parametrize("name", WORKLOADS)
def test_after_a_failure_at_any_acquire_or_release_nothing_leaks_and_no_token_changes(name):
    for number in tried(name):
        point = points(name)[number]
        play = Play(WORKLOADS[name], Faults(number))
        try:
            requests = play.serve()
            assert play.num_recovered == 1
            check(play, requests, name)
        except Exception as error:
            error.add_note(f"the failure was at point {number}: {point}")
            raise


@settings(max_examples=examples(120), deadline=None)
@given(name=st.sampled_from(sorted(WORKLOADS)), numbers=st.sets(st.integers(0, 1200), min_size=2, max_size=6))
def test_after_several_failures_nothing_leaks_and_no_token_changes(name, numbers):
    play = Play(WORKLOADS[name], Faults(*numbers))
    check(play, play.serve(), name)
