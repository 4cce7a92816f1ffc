"""Who is served first: arrival, priority, and prompts that may not take a whole step."""

from __future__ import annotations

import pytest
from fake_device import Loop
from small_schedulers import group, make_request, make_scheduler
from unpaged import alone


def test_the_lowest_priority_value_is_admitted_first_and_equals_by_arrival():
    loop = Loop(make_scheduler(policy="priority", max_num_seqs=1))
    requests = [make_request(3, 2, priority=priority) for priority in (2, -1, 0, 2, -1, None)]
    loop.run(*requests)
    assert loop.finished == [requests[i] for i in (1, 4, 2, 5, 0, 3)], "no priority counts as 0"


def test_a_later_request_of_better_priority_waits_but_is_not_the_victim():
    loop = Loop(make_scheduler(policy="priority", num_blocks=6, max_num_seqs=2))
    worse, better = make_request(7, 9, priority=1), make_request(7, 9, priority=0)
    loop.scheduler.add(worse)
    loop.step()
    assert loop.scheduler.running == [worse]
    steps = loop.run(better)
    assert {id(request) for step in steps for request in step.preempted} == {id(worse)}
    assert loop.finished == [better, worse]
    for request in (worse, better):
        assert request.sequences[0].output_token_ids == alone(request, [group()])[0]


def test_a_preempted_request_goes_back_behind_a_better_priority_that_came_meanwhile():
    loop = Loop(make_scheduler(policy="priority", num_blocks=6, max_num_seqs=2))
    first, victim = make_request(11, 12, priority=0), make_request(7, 9, priority=1)
    loop.scheduler.add(first)
    loop.scheduler.add(victim)
    while not loop.step().preempted:
        pass
    loop.scheduler.add(urgent := make_request(20, 2, priority=0))
    assert loop.scheduler.waiting == [urgent, victim]
    loop.run()
    assert loop.finished == [first, urgent, victim]


def test_a_priority_is_refused_where_requests_are_served_in_order_of_arrival():
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="priority=0 needs scheduling_policy='priority', not 'fcfs'"):
        scheduler.add(make_request(3, 2, priority=0))
    assert not scheduler.has_work


def test_a_threshold_bounds_every_prompt_chunk_and_recomputation_too():
    loop = Loop(make_scheduler(num_blocks=6, max_num_seqs=2, long_prefill_token_threshold=3))
    older, newer = make_request(11, 12), make_request(7, 9)
    steps = loop.run(older, newer)
    assert newer.num_preemptions > 0
    pauses = newer.metrics().preempted
    assert len(pauses) == newer.num_preemptions and all(out <= back <= newer.finished_time for out, back in pauses)
    assert max(chunk.length for step in steps for chunk in step.chunks) == 3
    for request in (older, newer):
        assert request.sequences[0].output_token_ids == alone(request, [group()])[0]
