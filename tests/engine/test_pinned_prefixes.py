"""Pinned prefixes that are lost and computed again, beside requests on the made-up device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_device import FakeDevice
from small_schedulers import group, make_request, make_scheduler
from unpaged import alone, hash_model

from jpaged.cache_retention import read_retention
from jpaged.engine.engine import Engine
from jpaged.engine.pinned_prefixes import PinnedPrefixes
from jpaged.engine.saved_state.load import _take_over_memory, load
from jpaged.execution import StepResults
from jpaged.memory.hash_chain import HashChain
from jpaged.memory.saving import memory_data
from jpaged.scheduling import Status
from jpaged.scheduling.saving import request_data

PIN = 10**6


class InFlight:
    """A step of the made-up device, computed as soon as it was dispatched."""

    is_started = True

    def __init__(self, step, sampled) -> None:
        self.step = step
        self._sampled = sampled

    def read_back(self) -> StepResults:
        tokens, top = self._sampled
        return StepResults((tokens, [-0.5] * len(tokens), top), [], [])


class FakeRunner:
    """Stands in the place of `jpaged.execution.Runner`, and counts the steps of its device."""

    def __init__(self, scheduler) -> None:
        self._device = FakeDevice(scheduler.memory.layout, hash_model)
        self.num_steps = 0
        self.worker = SimpleNamespace(
            restart=lambda: None, close=lambda: None, compilations=SimpleNamespace(running=None, num_recompiles=0)
        )

    def dispatch_all(self, steps) -> list[InFlight | None]:
        (step,) = steps
        self.num_steps += bool(step.chunks)
        sampled = self._device.run(step)
        return [InFlight(step, sampled) if step.chunks else None]

    def give_back(self, pages) -> None:
        pass


def make_engine(num_blocks: int, budget: int = 64, **options) -> Engine:
    scheduler = make_scheduler(num_blocks, prefix_caching=True, max_num_seqs=4, budget=budget, **options)
    return Engine([scheduler], FakeRunner(scheduler), max_model_len=40)


def pin(engine: Engine, num_tokens: int) -> None:
    assert engine.pin_prefix(PIN, [make_request(range(num_tokens), 1)]) == num_tokens


def lose_the_pool(engine: Engine) -> None:
    """Do what new weights do with requests that run, and a step that failed."""
    with engine.change():
        engine.recovery.begin_again()


def forget_the_old_weights(engine: Engine) -> None:
    """Do what new weights do where running requests keep what the old ones computed."""
    with engine.change():
        engine.replicas[0].pins.release()
        engine.memory.new_generation()


def steps_until_pinned(engine: Engine) -> int:
    """The steps until no prefix is lost, each of which is one of the device."""
    before = engine.runner.num_steps
    steps = 0
    while engine.replicas[0].pins.lost:
        engine.step()
        steps += 1
        assert engine.runner.num_steps - before == steps < 200
    return steps


def finish(engine: Engine, *requests) -> None:
    while engine.has_work:
        engine.step()
    assert [r.sequences[0].output_token_ids for r in requests] == [alone(r, [group()])[0] for r in requests]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_lost_prefix_is_computed_before_the_queue_and_a_step_is_one_of_the_device(policy):
    engine = make_engine(400, policy=policy)
    pin(engine, 16)
    urgencies = [None if policy == "fcfs" else i % 3 for i in range(40)]
    requests = [make_request([9, i], 10, priority=urgency) for i, urgency in enumerate(urgencies)]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    lose_the_pool(engine)
    assert steps_until_pinned(engine) <= 3
    assert engine.prefixes.lengths == {PIN: 16} and engine.memory.pinned_prefix([*range(16), 3]) == 16
    finish(engine, *requests)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_that_run_go_on_until_a_lost_prefix_has_a_place_beside_them(policy):
    engine = make_engine(400, policy=policy)
    pin(engine, 16)
    requests = [make_request([9, i], 10 if i else 4) for i in range(6)]
    for request in requests:
        engine.add(request)
    engine.step()
    forget_the_old_weights(engine)
    steps_until_pinned(engine)
    assert requests[0].status is Status.FINISHED and requests[5].first_scheduled_time is None
    finish(engine, *requests)


def one_request_and_a_lost_prefix():
    """An engine with a request that runs, and a long prefix that was lost meanwhile."""
    engine = make_engine(40, budget=8)
    pin(engine, 36)
    engine.add(request := make_request([9, 9], 3))
    engine.step()
    forget_the_old_weights(engine)
    return engine, request


def test_nothing_is_left_running_where_nobody_waits_and_the_next_request_brings_the_prefix_back():
    engine, request = one_request_and_a_lost_prefix()
    finish(engine, request)
    assert not engine.requests.unfinished and engine.replicas[0].pins.lost == {PIN}
    engine.add(request := make_request([9, 9], 3))
    assert steps_until_pinned(engine) <= 6
    finish(engine, request)
    engine.unpin(PIN)
    assert not engine.prefixes.lengths and engine.memory.num_used_blocks == 0


def test_nothing_is_left_running_once_the_last_request_is_dropped():
    engine, request = one_request_and_a_lost_prefix()
    engine.step()
    assert engine.prefixes.num_coming == 1
    engine.abort(request)
    assert not engine.has_work and not engine.requests.unfinished and engine.replicas[0].pins.lost == {PIN}


def give_up_the_prefix(engine: Engine) -> None:
    """Accept a request, while the prefix is lost, that fits no pool with it."""
    lose_the_pool(engine)
    engine.add(request := make_request([5] * 6, 40))
    finish(engine, request)


def test_a_prefix_that_is_given_up_is_forgotten():
    engine = make_engine(12)
    pin(engine, 8)
    give_up_the_prefix(engine)
    assert not engine.prefixes.lengths and not engine.prefixes.requests
    with pytest.raises(ValueError, match="is not pinned, or no longer"):
        engine.unpin(PIN)
    pin(engine, 8)


def test_a_saved_prefix_that_a_replica_does_not_hold_is_a_lost_one():
    """One of several replicas may have given it up, while the others hold it."""
    engine, other = make_engine(12), make_engine(12)
    pin(engine, 8)
    pins = engine.prefixes.requests
    give_up_the_prefix(engine)
    with other.change():
        saved = {"memory": memory_data(engine.memory), "lost_pins": []}
        _take_over_memory(other.replicas[0], saved, [], pins)
        other.prefixes.take_over(pins, {})
    assert other.replicas[0].pins.lost == {PIN}
    other.add(request := make_request([6] * 6, 4))  # what is cached holds nothing here
    finish(other, request)
    assert other.memory.pinned_prefix([*range(8), 3]) == 8
    other.unpin(PIN)
    assert other.memory.num_used_blocks == 0


# ---------------------------------------------------------------------- while requests run, and for so many seconds


class Clock:
    """A clock that stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_engine(num_blocks: int = 400, max_model_len: int = 40, **options) -> tuple[Engine, Clock]:
    clock = Clock()
    scheduler = make_scheduler(num_blocks, prefix_caching=True, max_num_seqs=4, budget=16, **options)
    return Engine([scheduler], FakeRunner(scheduler), max_model_len=max_model_len, clock=clock), clock


def running(engine: Engine, number: int = 6, tokens: int = 10) -> list:
    requests = [make_request([9, i], tokens) for i in range(number)]
    for request in requests:
        engine.add(request)
    engine.step()
    return requests


def nothing_is_left(engine: Engine) -> bool:
    return (
        engine.memory.num_used_blocks == 0
        and not engine.has_work
        and not engine.requests.unfinished
        and not engine.prefixes.lengths
        and not engine.replicas[0].pins.seq_ids
        and engine.prefixes.num_coming == 0
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_prefix_is_pinned_while_requests_run_which_get_their_tokens(policy):
    engine, _ = timed_engine(policy=policy)
    requests = [make_request([9, i], 10, priority=None if policy == "fcfs" else i % 3) for i in range(6)]
    for request in requests:
        engine.add(request)
    engine.step()
    pin(engine, 36)
    assert engine.has_work and engine.memory.pinned_prefix([*range(36), 3]) == 36
    finish(engine, *requests)
    engine.unpin(PIN)
    assert nothing_is_left(engine)


def test_a_pin_that_would_leave_a_request_no_room_is_refused_and_the_request_goes_on():
    engine, _ = timed_engine(num_blocks=12, max_model_len=8)
    (request,) = running(engine, 1, 38)  # grows to 10 blocks of 4
    with pytest.raises(ValueError, match="for a request that was accepted"):
        engine.pin_prefix(PIN, [make_request(range(12), 1)])
    assert not engine.replicas[0].pins.seq_ids and not engine.prefixes.lengths
    finish(engine, request)
    assert nothing_is_left(engine)


@pytest.mark.parametrize("is_cached", [False, True])
def test_pins_take_no_more_than_the_share_of_the_pool_that_their_caller_gives(is_cached):
    engine, _ = timed_engine(num_blocks=32, max_model_len=8)
    engine.pin_prefix(PIN, [make_request(range(16), 1)], 30.0, 0.25)  # 4 blocks of 4 tokens
    if is_cached:
        engine.pin_prefix(PIN + 1, [make_request(range(50, 70), 1)])
        engine.unpin(PIN + 1)
    with pytest.raises(ValueError, match="9 of the pool's 32 large pages pinned, the limit is 25%"):
        engine.pin_prefix(PIN + 1, [make_request(range(50, 70), 1)], 30.0, 0.25)
    assert engine.prefixes.lengths == {PIN: 16} and engine.replicas[0].pins.seq_ids == {PIN}
    engine.unpin(PIN)
    assert nothing_is_left(engine)


def test_a_pin_ends_when_its_seconds_are_over_and_not_before():
    engine, clock = timed_engine()
    clock.now = 5.0
    assert engine.pin_prefix(PIN, [make_request(range(16), 1)], 30.0) == 16
    clock.now = 34.9
    assert engine.prefixes.lengths == {PIN: 16}
    assert engine.prefixes.seconds_left(engine.prefixes.held[PIN]) == pytest.approx(0.1)
    clock.now = 35.0
    assert engine.prefixes.lengths == {} and nothing_is_left(engine)
    with pytest.raises(ValueError, match="is not pinned, or no longer"):
        engine.unpin(PIN)


def test_a_pin_that_is_over_takes_no_room_from_the_next_request():
    engine, clock = timed_engine(num_blocks=12)
    engine.pin_prefix(PIN, [make_request(range(8), 1)], 30.0)
    with pytest.raises(ValueError, match="can never fit"):
        engine.add(make_request([5] * 6, 41))
    clock.now = 31.0
    engine.add(request := make_request([5] * 6, 41))
    finish(engine, request)
    assert nothing_is_left(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("end", ["cancel", "lose the pool", "save"])
def test_a_pin_that_is_begun_never_stays_when_its_caller_goes(steps, end):
    engine, _ = timed_engine()
    requests = running(engine)
    assert engine.begin_pin(PIN, [make_request(range(36), 1)], 30.0) == 36
    for _ in range(steps):
        engine.step()
        engine.is_pinned(PIN)
    if end == "lose the pool":
        lose_the_pool(engine)
    elif end == "save":
        engine.settle()
        engine.prefixes.stop()
        assert set(engine.prefixes.requests) == ({PIN} if engine.prefixes.lengths else set())
        assert len(engine.prefixes.held) == (steps == 30)
    engine.prefixes.cancel(PIN)
    engine.prefixes.cancel(PIN)
    finish(engine, *requests)
    assert nothing_is_left(engine)


def test_a_pin_whose_pool_is_lost_in_between_is_computed_anew():
    engine, _ = timed_engine()
    engine.begin_pin(PIN, [make_request(range(36), 1)])
    engine.step()
    lose_the_pool(engine)
    while not engine.is_pinned(PIN):
        engine.step()
    assert engine.memory.pinned_prefix([*range(36), 3]) == 36


def test_a_restored_pin_stays_for_the_seconds_that_it_had_left():
    engine, clock = timed_engine()
    engine.pin_prefix(PIN, [make_request(range(16), 1)], 30.0)
    clock.now = 10.0
    left = {seq_id: engine.prefixes.seconds_left(one) for seq_id, one in engine.prefixes.held.items()}
    other, later = timed_engine()
    with other.change():
        pages = _take_over_memory(
            other.replicas[0],
            {"memory": memory_data(engine.memory), "lost_pins": []},
            [],
            {PIN: engine.prefixes.requests[PIN]},
        )
        other.prefixes.take_over(engine.prefixes.requests, left)
    assert pages and other.memory.pinned_prefix([*range(16), 3]) == 16
    later.now = 19.9
    assert other.prefixes.lengths == {PIN: 16}
    later.now = 20.0
    assert other.prefixes.lengths == {} and nothing_is_left(other)


# ---------------------------------------------------------------------- breakpoints of requests


def asking(tokens, breakpoints, output: int = 4):
    request = make_request(tokens, output)
    request.retention = read_retention(None, breakpoints)
    return request


def pinned(engine: Engine, tokens) -> int:
    return engine.memory.pinned_prefix([*tokens, -1])


def test_a_breakpoint_pins_its_prefix_for_its_seconds_and_the_next_request_extends_it():
    engine, clock = timed_engine()
    engine.add(request := asking(range(21), [(12, 300.0), (21, 60.0)]))
    finish(engine, request)
    assert pinned(engine, range(21)) == 20 and engine.prefixes.lengths == {}
    clock.now = 50.0
    engine.add(request := asking(range(21), [(12, 300.0), (21, 60.0)]))
    finish(engine, request)
    clock.now = 100.0
    engine.prefixes.expire()
    assert pinned(engine, range(21)) == 20
    clock.now = 110.0
    engine.prefixes.expire()
    assert pinned(engine, range(21)) == 12
    clock.now = 350.0
    engine.prefixes.expire()
    assert nothing_is_left(engine)


def test_a_restored_prompt_that_is_still_to_be_computed_pins_its_breakpoints():
    engine, _ = timed_engine()
    saved = request_data(asking(range(21), [(12, 300.0)]), 0.0)
    inputs = SimpleNamespace(look_again=lambda request: None, load=lambda data: None, reassign_ids=lambda request: None)
    host = {"pictures": [], "requests": [saved], "pins": {}, "replicas": [], "inputs": {}}
    (request,) = load(engine, inputs, host, lambda name: None, same_blocks=False)
    finish(engine, request)
    assert pinned(engine, range(21)) == 12


def test_breakpoints_take_the_names_of_blocks_from_their_request(monkeypatch):
    named, extend, keep = [], HashChain.extend, PinnedPrefixes.keep_breakpoints

    def counted(chain, token_ids, num_blocks):
        named[-1] += max(0, num_blocks - len(chain.links))
        extend(chain, token_ids, num_blocks)

    def watched(*args):
        named.append(0)
        with monkeypatch.context() as patch:
            patch.setattr(HashChain, "extend", counted)
            keep(*args)

    monkeypatch.setattr(PinnedPrefixes, "keep_breakpoints", watched)
    engine, _ = timed_engine()
    engine.add(request := asking(range(40), [(place, 60.0) for place in (3, 12, 13, 24, 40)]))
    finish(engine, request)
    assert named == [0] and pinned(engine, range(40)) == 40
    assert len(engine.replicas[0].pins.seq_ids) == 3, "12 and 13 end in one block, and 3 in none"


@pytest.mark.parametrize("what", ["lose the pool", "abort", "other weights"])
def test_a_breakpoint_leaves_nothing_when_its_prefix_is_lost(what):
    engine, _ = timed_engine()
    engine.add(request := asking(range(40), [(40, 300.0)], 1))
    if what == "abort":
        engine.step()
        engine.abort(request)
    else:
        finish(engine, request)
        assert pinned(engine, range(40)) == 40
        (lose_the_pool if what == "lose the pool" else forget_the_old_weights)(engine)
    engine.add(other := make_request([9, 9], 3))
    finish(engine, other)
    assert pinned(engine, range(40)) == 0 and nothing_is_left(engine)


def test_breakpoints_take_a_quarter_of_the_pool_and_the_newest_stay():
    engine, _ = timed_engine(num_blocks=40)
    for number in range(6):
        engine.add(request := asking([number] * 16, [(16, 300.0)]))
        finish(engine, request)
    assert [pinned(engine, [number] * 16) for number in range(6)] == [0, 0, 0, 0, 16, 16]
    assert engine.memory.num_used_blocks == 8


def test_a_share_of_the_pool_bounds_the_pins_of_calls_and_what_is_computed_for_one():
    engine, _ = timed_engine(num_blocks=16, max_model_len=8)
    engine.add(request := asking([1] * 16, [(16, 300.0)]))
    finish(engine, request)
    steps = engine.stats.num_steps
    with pytest.raises(
        ValueError, match="36 tokens would make 9 of the pool's 16 large pages pinned, the limit is 50%"
    ):
        engine.pin_prefix(PIN, [make_request(range(36), 1)], most_share=0.5)
    assert engine.stats.num_steps == steps, "nothing was computed for it"
    assert engine.pin_prefix(PIN, [make_request(range(20), 1)], most_share=0.5) == 20
    with pytest.raises(ValueError, match="16 tokens would make 9 of the pool's 16 large pages pinned"):
        engine.pin_prefix(PIN + 1, [make_request([3] * 16, 1)], most_share=0.5)
    assert pinned(engine, range(20)) == 20
    engine.unpin(PIN)


def test_a_request_without_room_ends_breakpoints_rather_than_to_be_refused():
    engine, _ = timed_engine(num_blocks=16, max_model_len=8)
    engine.add(request := asking([1] * 16, [(16, 300.0)]))
    finish(engine, request)
    urgent = make_request([5] * 6, 4)
    urgent.priority = 1
    engine.pin_prefix(PIN, [make_request([2] * 8, 1)])
    for refused, why in ((urgent, "priority=1"), (make_request([5] * 6, 56), "can never fit")):
        with pytest.raises(ValueError, match=why):
            engine.add(refused)
    assert pinned(engine, [1] * 16) == 16
    engine.unpin(PIN)
    engine.add(request := make_request([5] * 6, 54))
    finish(engine, request)
    assert nothing_is_left(engine)
