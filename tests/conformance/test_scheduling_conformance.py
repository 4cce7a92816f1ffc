"""What every continuous-batching scheduler has to do, one behaviour a test, with made-up tokens."""

from __future__ import annotations

from itertools import count

import pytest
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone

from jpaged.scheduling import Status


def seqs(step) -> list:
    return [chunk.seq for chunk in step.chunks]


def test_two_requests_and_room_for_one_the_newest_is_preempted_and_re_prefills_prompt_and_generated():
    loop = Loop(make_scheduler(num_blocks=6, max_num_seqs=2))
    older, newer = make_request(11, 12), make_request(7, 9)
    steps = loop.run(older, newer)
    at = next(i for i, step in enumerate(steps) if step.preempted)
    assert steps[at].preempted == [newer]
    seq = newer.sequences[0]
    had = 7 + sum(seq is sample.seq for step in steps[:at] for sample in step.samples)
    again = next(chunk for step in steps[at:] for chunk in step.chunks if chunk.seq is seq)
    assert had > 7 and (again.start, again.length) == (0, had)
    assert seq.output_token_ids == alone(newer, [group()])[0]


def test_a_prompt_too_long_is_refused_and_the_queue_goes_on():
    loop = Loop(make_scheduler(num_blocks=10))
    before, after = make_request(4, 3), make_request(4, 3)
    loop.scheduler.add(before)
    with pytest.raises(ValueError, match=r"a request of 50 prompt tokens .* can never fit the pool of 10 large pages"):
        loop.scheduler.add(make_request(50, 1))
    loop.run(after)
    assert loop.finished == [before, after]


@settings(max_examples=examples(50), deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    outputs=st.integers(1, 12),
    max_num_seqs=st.integers(1, 6),
    extra=st.integers(0, 20),
)
def test_the_token_budget_is_never_exceeded_and_nobody_is_skipped(prompts, outputs, max_num_seqs, extra):
    budget = max_num_seqs + extra
    loop = Loop(make_scheduler(num_blocks=200, max_num_seqs=max_num_seqs, budget=budget))
    requests = [make_request(length, outputs) for length in prompts]
    decoding: set = set()
    for step in loop.run(*requests):
        assert step.num_tokens <= budget
        assert decoding <= set(seqs(step)), "a sequence that decodes got no token"
        drawn = {seq: start + length + 1 - seq.num_prompt for _, seq, (_, start, length, *_) in step.samples}
        decoding = {seq for seq, number in drawn.items() if number < outputs}
    assert sorted(requests, key=lambda request: request.first_scheduled_time) == requests
    assert all(len(request.sequences[0].output_token_ids) == outputs for request in requests)


def test_max_num_seqs_holds():
    loop = Loop(make_scheduler(max_num_seqs=3))
    steps = loop.run(*[make_request(2, 5) for _ in range(7)])
    assert max(len(step.chunks) for step in steps) == 3
    assert len(loop.finished) == 7


def test_three_800_token_prompts_budget_1024_long_prefill_threshold_400():
    scheduler = make_scheduler(num_blocks=700, budget=1024, max_num_seqs=3, long_prefill_token_threshold=400)
    for _ in range(3):
        scheduler.add(make_request(800, 1))
    assert [chunk.length for chunk in scheduler.schedule().chunks] == [400, 400, 224]


ENDS = {
    "eos": ({"max_tokens": 9, "eos": [2]}, [0, 1, 2], "stop", None),
    "stop ids": ({"max_tokens": 9, "stop_token_ids": [3]}, [0, 1, 2, 3], "stop", 3),
    "max_tokens": ({"max_tokens": 4}, [0, 1, 2, 3], "length", None),
    "ignore_eos": ({"max_tokens": 4, "eos": [1], "ignore_eos": True}, [0, 1, 2, 3], "length", None),
    "min_tokens": ({"max_tokens": 9, "eos": [1, 5], "min_tokens": 4}, [0, 1, 2, 3, 4, 5], "stop", None),
}


@pytest.mark.parametrize(("options", "tokens", "reason", "stop_reason"), ENDS.values(), ids=ENDS)
def test_the_right_tokens_and_reason(options, tokens, reason, stop_reason):
    numbers = count()
    loop = Loop(make_scheduler(), lambda name: next(numbers))
    request = make_request(3, **options)
    loop.run(request)
    seq = request.sequences[0]
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (tokens, reason, stop_reason)


def test_priority_order():
    loop = Loop(make_scheduler(policy="priority", max_num_seqs=1))
    requests = [make_request(3, 2, priority=priority) for priority in (1, 0, 2, 0)]
    loop.run(*requests)
    assert loop.finished == [requests[i] for i in (1, 3, 0, 2)]


@pytest.mark.parametrize(("priorities", "victim"), [((1, 0, 0), 0), ((0, 1, 0), 1), ((0, 1, 1), 2)])
def test_the_priority_victim_is_the_lowest_and_among_equals_the_newest(priorities, victim):
    loop = Loop(make_scheduler(num_blocks=6, policy="priority", max_num_seqs=3))
    requests = [make_request(7, 9, priority=priority) for priority in priorities]
    for request in requests:
        loop.scheduler.add(request)
    while not (step := loop.step()).preempted:
        assert all(request.status is Status.RUNNING for request in requests)
    assert step.preempted[0] is requests[victim]
