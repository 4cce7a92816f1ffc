"""With priorities the most urgent requests run, and whoever is strictly less urgent gives way."""

from __future__ import annotations

import pytest
from arrivals import GROUPS, drawn_arrivals, in_order, pages_for, serve
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone

from jpaged.scheduling import Request, Scheduler, Status
from jpaged.scheduling.admission import Admission
from jpaged.scheduling.step import missing_tokens

MODES = ["recompute", "swap"]


def priority_loop(num_blocks: int, **options) -> Loop:
    return Loop(make_scheduler(num_blocks, policy="priority", **options))


def steps_until_first_token(loop: Loop, request: Request) -> int:
    loop.scheduler.add(request)
    steps = 0
    while request.first_token_time is None:
        loop.step()
        steps += 1
        assert steps < 200, "it never runs"
    return steps


def is_right(*requests: Request) -> bool:
    return all(request.sequences[0].output_token_ids == alone(request, [group()])[0] for request in requests)


@pytest.mark.parametrize("mode", MODES)
def test_an_urgent_request_takes_the_slot_of_the_least_urgent(mode):
    loop = priority_loop(64, max_num_seqs=2, preemption_mode=mode, swap_blocks=64)
    first, second = make_request(5, 30, priority=3), make_request([2, 3, 4], 30, priority=5)
    for request in (first, second):
        loop.scheduler.add(request)
    loop.step()
    urgent = make_request([7] * 6, 3, priority=0)
    assert steps_until_first_token(loop, urgent) == 2
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    loop.run()
    assert loop.finished == [urgent, first, second] and is_right(first, second, urgent)


@pytest.mark.parametrize("mode", MODES)
def test_an_urgent_request_takes_the_memory_of_as_many_as_it_needs(mode):
    loop = priority_loop(12, max_num_seqs=8, preemption_mode=mode, swap_blocks=12)
    requests = [make_request([i] * 9, 3, priority=1 + i) for i in range(4)]  # 3 blocks each
    for request in requests:
        loop.scheduler.add(request)
    loop.step()
    urgent = make_request([7] * 18, 3, priority=0)  # 5 blocks, 6 in the end
    assert steps_until_first_token(loop, urgent) == 2
    assert [request.num_preemptions for request in requests] == [0, 0, 1, 1]
    loop.run()
    assert is_right(urgent, *requests)


def test_a_swapped_request_does_not_hold_back_a_more_urgent_one():
    loop = priority_loop(9, max_num_seqs=4, preemption_mode="swap", swap_blocks=9)
    long, lazy = make_request(9, 26, priority=1), make_request([3] * 9, 20, priority=9)
    for request in (long, lazy):
        loop.scheduler.add(request)
    while lazy.status is not Status.SWAPPED:
        loop.step()
    urgent = make_request([7] * 3, 1, priority=0)
    assert steps_until_first_token(loop, urgent) == 2
    assert lazy.status is Status.SWAPPED
    loop.run()
    assert is_right(long, lazy, urgent)


def test_a_swapped_request_comes_back_in_place_of_less_urgent_ones():
    loop = priority_loop(8, max_num_seqs=4, preemption_mode="swap", swap_blocks=8)
    middle = make_request([3] * 13, 14, priority=5)
    loop.scheduler.add(middle)
    loop.step()
    urgent = make_request([7] * 13, 12, priority=0)
    loop.scheduler.add(urgent)
    while middle.status is not Status.SWAPPED:
        loop.step()
    loop.scheduler.add(lazy := make_request([5] * 3, 20, priority=9))
    loop.run()
    assert loop.finished == [urgent, middle, lazy] and is_right(urgent, middle, lazy)


def test_equal_priorities_never_take_each_others_place():
    loop = priority_loop(64, max_num_seqs=2)
    requests = [make_request([i] * 4, 6, priority=4) for i in range(5)]
    loop.run(*requests)
    assert loop.scheduler.num_preemptions == 0 and loop.finished == requests


def test_nobody_is_preempted_for_a_request_that_would_not_fit_even_then():
    loop = priority_loop(10, max_num_seqs=4)
    peer, lazy = make_request([1] * 20, 4, priority=0), make_request([2] * 4, 4, priority=5)
    for request in (peer, lazy):
        loop.scheduler.add(request)
    loop.step()
    loop.scheduler.add(urgent := make_request([7] * 30, 2, priority=0))  # 8 blocks, of which peer has 5
    while peer.status is Status.RUNNING:
        loop.step()
    assert lazy.num_preemptions == 0 and urgent.first_scheduled_time is None
    loop.run()
    assert is_right(peer, lazy, urgent)


def test_without_priorities_nothing_is_admitted_while_a_swapped_request_waits():
    loop = Loop(make_scheduler(9, max_num_seqs=4, preemption_mode="swap", swap_blocks=9))
    older, newer = make_request(9, 26), make_request([3] * 9, 20)
    for request in (older, newer):
        loop.scheduler.add(request)
    while newer.status is not Status.SWAPPED:
        loop.step()
    loop.scheduler.add(small := make_request([7] * 3, 1))
    while newer.status is Status.SWAPPED:
        loop.step()
        assert newer.status is not Status.SWAPPED or small.status is Status.WAITING


def blocks_to_enter(request: Request) -> int:
    """Blocks of 4 tokens that a request needs to be let in: its own, or, swapped out, those and one more."""
    seq = request.sequences[0]
    if request.status is Status.SWAPPED:
        return -(-seq.num_computed // 4) + 1
    return -(-seq.num_tokens // 4)


def may_enter(scheduler: Scheduler, request: Request, blocks: dict[int, int]) -> bool:
    """Whether a request would have a slot and memory if all running ones that are strictly less urgent went, told
    from the number of blocks that each held when the step was planned."""
    staying = [r for r in scheduler.running if r.priority <= request.priority]
    held = sum(blocks[r.request_id] for r in staying)
    return (
        len(staying) < scheduler.max_num_seqs and held + blocks_to_enter(request) <= scheduler.memory.layout.num_pages
    )


def plain_search(scheduler: Scheduler, request: Request, plan, is_enough) -> list[Request] | None:
    """`Admission.find_victims` by asking for one victim after another."""
    victims: list[Request] = []
    rows, tokens, memory = len(scheduler.allocation.free_rows), plan.left - plan.reserved, scheduler.memory
    need, estimate = scheduler.admission.need(request), memory.reclaim_estimate()
    while True:
        others = scheduler.running[: len(scheduler.running) - len(victims)]
        crowded = others and (request.runs_exclusively or others[0].runs_exclusively)
        has_place = len(request.live) <= rows and is_enough(tokens) and not crowded
        if has_place and scheduler.admission.fits(request, need, others, estimate):
            return victims
        if not others or others[-1].priority <= request.priority:
            return None
        victims.append(others[-1])
        for seq in others[-1].live:
            if seq.parent is None:
                estimate.add_sequence(seq.seq_id)
        rows += len(others[-1].live)
        tokens += sum(missing_tokens(others[-1], seq) == 1 for seq in others[-1].live)


@settings(max_examples=examples(150), deadline=None)
@given(
    arrivals=drawn_arrivals,
    priorities=st.lists(st.integers(0, 3), min_size=10, max_size=10),
    groups=st.sampled_from(sorted(GROUPS.keys() - {"budgets"})),
    spare_pages=st.integers(0, 30),
    max_num_seqs=st.integers(2, 8),
    prefix_caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.1]),
    mode=st.sampled_from(MODES),
)
def test_as_few_give_way_as_a_search_one_by_one_finds(
    arrivals, priorities, groups, spare_pages, max_num_seqs, prefix_caching, watermark, mode
):
    options = {
        "groups": GROUPS[groups],
        "max_num_seqs": max_num_seqs,
        "budget": 64,
        "prefix_caching": prefix_caching,
        "watermark": watermark,
    }
    num_pages = pages_for(arrivals, options) + spare_pages
    loop = priority_loop(num_pages, preemption_mode=mode, swap_blocks=num_pages, **options)
    scheduler, find_victims = loop.scheduler, loop.scheduler.admission.find_victims

    def find_and_compare(request, plan, is_enough):
        found = find_victims(request, plan, is_enough)
        assert found == plain_search(scheduler, request, plan, is_enough)
        return found

    scheduler.admission.find_victims = find_and_compare
    coming = in_order(arrivals)
    for arrival, priority in zip(coming, priorities, strict=False):
        arrival.request.priority = priority
    serve(loop, coming)
    assert loop.num_used_blocks == 0


def test_a_request_that_finds_no_room_asks_no_oftener_where_more_are_less_urgent(monkeypatch):
    asked = []
    fits = Admission.fits
    monkeypatch.setattr(Admission, "fits", lambda *args: asked.append(args) or fits(*args))
    numbers = []
    for count in (4, 16):
        loop = priority_loop(200, max_num_seqs=20, budget=600)
        loop.scheduler.add(make_request([1] * 500, 40, priority=0))
        for number in range(count):
            loop.scheduler.add(make_request([number] * 4, 40, priority=5))
        loop.step()
        loop.scheduler.add(urgent := make_request([7] * 400, 2, priority=1))
        asked.clear()
        loop.step()
        assert urgent.first_scheduled_time is None
        numbers.append(len(asked))
    assert numbers == [2, 2]


@settings(max_examples=examples(200), deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 20),  # prompt tokens
            st.integers(1, 16),  # max_tokens
            st.integers(0, 3),  # priority
            st.integers(0, 15),  # step of arrival
        ),
        min_size=3,
        max_size=10,
    ),
    num_blocks=st.integers(9, 16),
    max_num_seqs=st.integers(1, 4),
    mode=st.sampled_from(MODES),
)
def test_nobody_waits_for_a_less_urgent_one_whose_place_would_do(requests, num_blocks, max_num_seqs, mode):
    loop = priority_loop(num_blocks, max_num_seqs=max_num_seqs, budget=64, preemption_mode=mode, swap_blocks=num_blocks)
    scheduler = loop.scheduler
    todo = [
        (make_request([number] * length, most, priority=priority), arrival)
        for number, (length, most, priority, arrival) in enumerate(requests)
    ]
    everybody = [request for request, _ in todo]
    now = 0
    while todo or scheduler.has_work or loop.in_flight is not None:
        for request, _ in [pair for pair in todo if pair[1] <= now]:
            scheduler.add(request)
        todo = [pair for pair in todo if pair[1] > now]
        was_running = list(scheduler.running)
        pending = {request.request_id for request in everybody if request.sequences[0].num_pending}
        step = loop.scheduler.schedule()
        blocks = {r.request_id: -(-r.sequences[0].num_computed // 4) for r in scheduler.running}
        line = sorted(
            [*scheduler.waiting, *scheduler.swapped], key=lambda r: (r.priority, r.status.value, r.arrival_number)
        )
        if line and line[0].request_id not in pending:
            ahead = line[0]
            least = max((request.priority for request in scheduler.running), default=ahead.priority)
            assert ahead.priority >= least or not may_enter(scheduler, ahead, blocks), "it could run"
        for victim in step.preempted:
            assert victim in was_running
            urgent = [
                r
                for r in scheduler.running
                if (r.priority, r.arrival_number) < (victim.priority, victim.arrival_number)
            ]
            entered = [r for r in urgent if r not in was_running]
            assert urgent, "it gave way to nobody"
            if entered:  # for these only the strictly less urgent go; the last in service order go for running ones
                assert any(r.priority < victim.priority for r in urgent)
        sampled = loop.device.run(step)
        loop.drain()
        loop.in_flight = (step, *sampled) if step.chunks else None
        loop.check(step)
        now += 1
        assert now < 2_000, "it does not end"
    assert is_right(*everybody)
