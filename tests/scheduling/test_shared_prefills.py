"""Requests that begin alike and come together compute what they share once."""

from __future__ import annotations

from types import SimpleNamespace

from fake_device import Loop
from hypothesis import given
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from unpaged import alone

from jpaged.scheduling.admission import common_prefix
from jpaged.scheduling.planning import NextTokens
from jpaged.scheduling.step import StepPlan

BLOCKS_OF_16 = [group(block_size=16)]


def loop_of(**options):
    options = {"groups": BLOCKS_OF_16, "num_blocks": 200, "budget": 512, "prefix_caching": True} | options
    return Loop(make_scheduler(**options))


def first_steps(loop, requests):
    """The step in which each request got its first chunk."""
    steps = loop.run(*requests)
    chunks = [{chunk.seq.seq_id for chunk in step.chunks} for step in steps]
    return [next(i for i, ids in enumerate(chunks) if r.sequences[0].seq_id in ids) for r in requests]


def peak(loop, requests, gap):
    """Most blocks in use while the requests arrive `gap` steps apart and run to their ends."""
    todo, most, now = list(requests), 0, 0
    while todo or loop.scheduler.has_work:
        while todo and now >= gap * (len(requests) - len(todo)):
            loop.scheduler.add(todo.pop(0))
        loop.step()
        most, now = max(most, loop.num_used_blocks), now + 1
    return most


def test_eight_equal_prompts_share_their_blocks_however_they_come():
    for gap in (0, 1, 1.5, 3):
        prompts = [make_request(range(160), 40) for _ in range(8)]
        assert peak(loop_of(), prompts, gap) <= 9 + 8 * 4
        assert [r.num_cached_tokens for r in prompts] == [0] + [144] * 7
        for request in prompts:
            assert request.sequences[0].output_token_ids == alone(request, BLOCKS_OF_16)[0]


def test_eight_equal_prompts_in_small_chunks_wait_for_the_first():
    prompts = [make_request(range(160), 4) for _ in range(8)]
    loop = loop_of(budget=32)
    starts = first_steps(loop, prompts)
    assert starts[1] == 5, "the first takes five steps of 32"
    assert [r.num_cached_tokens for r in prompts] == [0] + [144] * 7


def test_the_second_of_two_equal_prompts_waits_one_step():
    assert first_steps(loop_of(), [make_request(range(160), 4) for _ in range(2)]) == [0, 1]


def test_nobody_waits_for_less_than_a_step_costs():
    short = [make_request(range(100), 4) for _ in range(2)]
    assert first_steps(loop_of(), short) == [0, 0]
    beginning = [*range(40)]
    differ = [make_request([*beginning, *[token] * 200], 4) for token in (1, 2)]
    assert first_steps(loop_of(), differ) == [0, 0]


def test_nobody_waits_for_blocks_that_are_not_his_to_use():
    salted = [make_request(range(200), 4, cache_salt=salt) for salt in ("a", "b")]
    assert first_steps(loop_of(), salted) == [0, 0]
    scored = [make_request(range(200), 4), make_request(range(200), 4, prompt_logprobs=1)]
    assert first_steps(loop_of(), scored) == [0, 0]
    equal = [make_request(range(200), 4) for _ in range(2)]
    assert first_steps(loop_of(prefix_caching=False), equal) == [0, 0]
    assert first_steps(
        loop_of(groups=[group(budget=32, block_size=16)]), equal := [make_request(range(200), 4) for _ in equal]
    ) == [0, 0], "what keeps a part of a prompt caches nothing"


def test_a_prompt_that_gives_way_in_a_step_is_not_waited_for():
    full = SimpleNamespace(
        memory=SimpleNamespace(layout=SimpleNamespace(prompt_tail=0)),
        holds=SimpleNamespace(shorten=lambda *given: None),
        allocate=lambda seq, end: None,
    )
    request, plan = make_request(range(160), width=2), StepPlan(0)  # the first has no tokens in the step
    request.sequences[1].num_computed = 159  # and the second no block
    assert not NextTokens(full, None, max_chunk=512).plan(request, plan, lambda seq, copies: False)
    assert not plan.begun


def test_a_prefix_that_is_cached_already_is_not_waited_for():
    loop = loop_of()
    loop.run(make_request(range(200), 4))
    scoring, again = make_request(range(200), 4, prompt_logprobs=1), make_request(range(200), 4)
    assert first_steps(loop, [scoring, again]) == [0, 0]
    assert again.num_cached_tokens == 192


def test_the_wait_ends_when_the_first_is_aborted():
    loop = loop_of(budget=32)
    first, second = make_request(range(160), 4), make_request(range(160), 4)
    for request in (first, second):
        loop.scheduler.add(request)
    loop.step()
    loop.step()
    loop.scheduler.abort(first)
    step = loop.step()
    assert [chunk.seq for chunk in step.chunks] == second.sequences
    assert second.num_cached_tokens == 64, "what the first had computed"
    loop.run()
    assert second.sequences[0].output_token_ids == alone(second, BLOCKS_OF_16)[0]


def test_a_block_is_found_by_the_step_after_the_one_that_fills_it():
    loop = loop_of()
    first = make_request(range(40), 30)
    loop.scheduler.add(first)
    loop.step()
    second = make_request(range(40), 4)
    loop.scheduler.add(second)
    loop.step()
    assert second.num_cached_tokens == 32
    while first.sequences[0].num_output < 10:  # the token that fills the third block has come
        loop.step()
    third = make_request([*first.sequences[0].token_ids[:49]], 4)
    loop.scheduler.add(third)
    loop.step()
    assert third.num_cached_tokens == 48


def test_what_was_scheduled_but_not_dispatched_is_never_found():
    scheduler = make_scheduler(groups=BLOCKS_OF_16, num_blocks=50, budget=512, prefix_caching=True)
    request = make_request(range(100), 4)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.abort(request)
    assert scheduler.memory.cached_prefix([*range(100)]) == 0
    assert scheduler.memory.num_used_blocks == 0


short_lists = st.lists(st.integers(0, 1), max_size=8)


@given(short_lists, short_lists)
def test_the_common_prefix_is_where_the_first_difference_is(a, b):
    pairs = zip(a, b, strict=False)
    assert common_prefix(a, b) == next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
