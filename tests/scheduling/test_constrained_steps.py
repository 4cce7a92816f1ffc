"""Sequences with a grammar take part in every step, with the tokens that they draw alone."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rules import Follows, Masks, changing, constrained_alone, constrained_request, with_runs
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone

from jpaged.scheduling.constrained import wait_for_mask
from jpaged.scheduling.speculation import StepCosts
from jpaged.speculative import NGram

GROUPS = [group()]


PAYS = StepCosts(token=0.01, verifying=0.15)
NEVER = StepCosts(token=2.0, verifying=0.15)


def ending(length: int, follows: Follows = changing) -> Follows:
    """Return a grammar that is complete after so many tokens."""
    return lambda tokens: follows(tokens) if len(tokens) < length else set()


def outputs(request):
    return [seq.output_token_ids for seq in request.sequences]


def test_every_sequence_of_a_mixed_batch_gets_a_token_in_every_step():
    constrained = [constrained_request([5, 6, number], 12) for number in range(3)]
    plain = [make_request([7, number], 12) for number in range(3)]
    loop = Loop(make_scheduler())
    steps = loop.run(*constrained, *plain)
    drawn = [Counter(sample.seq.seq_id for sample in step.samples) for step in steps]
    everyone = Counter(request.sequences[0].seq_id for request in (*constrained, *plain))
    assert drawn[:12] == [everyone] * 12 and len([step for step in steps if step.samples]) == 12
    assert [step.draws_late for step in steps[:12]] == [False] + [True] * 11
    assert [outputs(request) for request in constrained] == [constrained_alone(r, GROUPS) for r in constrained]
    assert [outputs(request) for request in plain] == [[alone(r, GROUPS)[0]] for r in plain]


def test_a_step_without_grammars_never_draws_late():
    requests = [make_request([1, number], 9, width=1 + number % 2) for number in range(4)]
    assert not any(step.draws_late for step in Loop(make_scheduler()).run(*requests))


def test_a_grammar_that_ends_throws_the_pass_ahead_away():
    request = constrained_request([5], 12, ending(4))
    steps = Loop(make_scheduler()).run(request)
    assert len(request.sequences[0].output_token_ids) == 4 and request.sequences[0].finish_reason == "stop"
    assert sum(bool(step.samples) for step in steps) == 5, "the pass after the last token was dispatched before it"


def test_all_masks_of_a_step_are_made_in_one_call():
    masks = Masks()
    requests = [constrained_request([5, number], 6, masks=masks, width=2) for number in range(3)]
    Loop(make_scheduler()).run(*requests, make_request([1], 6))
    assert masks.calls == [6] * 6


def forced_after_first(tokens):
    """A run of 5 forced tokens after each free one."""
    return {number % 13} if (number := len(tokens)) % 6 else changing(tokens)


@pytest.mark.parametrize(("costs", "most"), [(PAYS, 6), (NEVER, 1), (None, 1)])
def test_a_forced_run_is_computed_as_one_chunk_where_that_pays(costs, most):
    request, other = constrained_request([5, 6], 24, forced_after_first), make_request([7], 24)
    scheduler = make_scheduler(costs=costs)
    steps = Loop(scheduler).run(request, other)
    seq = request.sequences[0]
    lengths = [chunk.length for step in steps for chunk in step.chunks if chunk.seq is seq]
    assert max(lengths[1:]) == max(1, most - 1) and [seq.output_token_ids] == constrained_alone(
        request, GROUPS, forced_after_first
    )
    assert other.sequences[0].output_token_ids == alone(other, GROUPS)[0]
    assert scheduler.constrained.num_forced == (20 if costs is PAYS else 0)
    drawn = sum(sample.seq is seq for step in steps for sample in step.samples)
    assert drawn < 12 if costs is PAYS else drawn == 24


def test_a_run_whose_log_probabilities_are_asked_for_is_drawn():
    request = constrained_request([5, 6], 24, forced_after_first, logprobs=1)
    scheduler = make_scheduler(costs=PAYS)
    Loop(scheduler).run(request)
    assert scheduler.constrained.num_forced == 0 and len(request.sequences[0].logprobs) == 24


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_a_forced_run_ends_where_the_request_does(max_tokens):
    request = constrained_request([5, 6], max_tokens, forced_after_first)
    stopped = constrained_request([5, 6], 14, forced_after_first, stop_token_ids=[3])
    Loop(make_scheduler(costs=PAYS)).run(request, stopped)
    assert outputs(request) == constrained_alone(request, GROUPS, forced_after_first)
    assert request.sequences[0].finish_reason == "length"
    (whole,) = constrained_alone(stopped, GROUPS, forced_after_first)
    assert stopped.sequences[0].output_token_ids == whole[: whole.index(3) + 1]
    assert (stopped.sequences[0].finish_reason, stopped.sequences[0].stop_reason) == ("stop", 3)


def test_a_sequence_with_a_slow_mask_is_planned_when_that_is_made():
    masks = Masks()
    slow = constrained_request([5, 6], 12, masks=masks)
    plain, quick = make_request([7], 40), constrained_request([8], 40)
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    for request in (slow, plain, quick):
        scheduler.add(request)
    seq = slow.sequences[0]
    seq.grammar.is_slow = True
    for number in range(40):
        loop.step()
        if number % 5 == 4:
            masks.finish()
    for request in (plain, quick):
        assert len(request.sequences[0].output_token_ids) == 39, "the others got a token in every step"
    assert 8 <= len(seq.output_token_ids) <= 12
    while scheduler.has_work:
        masks.finish()
        loop.step()
    assert [outputs(r) for r in (slow, quick)] == [constrained_alone(r, GROUPS) for r in (slow, quick)]


def test_a_wait_ends_with_the_first_mask_of_any_replica():
    masks = Masks()
    requests = [constrained_request([5, number], 4, masks=masks) for number in range(2)]
    schedulers = [make_scheduler() for _ in requests]
    for scheduler, request in zip(schedulers, requests, strict=True):
        request.sequences[0].grammar.is_slow = True
        scheduler.add(request)
        loop = Loop(scheduler)
        while not scheduler.constrained.being_made:
            loop.step()
    several = [scheduler.constrained for scheduler in schedulers]
    wait_for_mask(several)  # ends without one too, for signals
    assert not any(made.done() for each in several for made in each.being_made)
    threading.Timer(0.001, masks.finish).start()
    while not all(made.done() for each in several for made in each.being_made):
        wait_for_mask(several)


def test_an_error_that_a_thread_finds_ends_the_sequence_with_the_tokens_before():
    masks = Masks()
    request = constrained_request([5, 6], 12, masks=masks)
    rules = request.sequences[0].grammar
    rules.is_slow = True
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    scheduler.add(request)
    while not masks.begun:
        loop.step()
    known = request.sequences[0].output_token_ids
    rules.error = "it grew too complex"
    masks.finish()
    while scheduler.has_work:
        loop.step()
    seq = request.sequences[0]
    assert (seq.finish_reason, seq.stop_reason, seq.output_token_ids) == ("abort", rules.error, known)


def test_a_restart_waits_for_masks_in_the_thread_and_follows_the_grammar_anew():
    masks = Masks()
    request = constrained_request([5, 6], 8, masks=masks)
    request.sequences[0].grammar.is_slow = True
    scheduler = make_scheduler()
    loop = Loop(scheduler)
    scheduler.add(request)
    while not masks.begun:
        loop.step()
    threading.Timer(0.05, masks.finish).start()
    loop.in_flight = None
    scheduler.restart()
    assert not masks.begun and not request.sequences[0].awaits_mask
    request.sequences[0].grammar.is_slow = False
    Loop(scheduler).run()
    assert outputs(request) == constrained_alone(request, GROUPS)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(1, 14)),
        min_size=1,
        max_size=6,
    ),
    st.integers(6, 24),
    st.sampled_from(["recompute", "swap"]),
    st.sampled_from([None, NGram(2), NGram(8)]),
    st.sampled_from([None, PAYS, NEVER]),
)
def test_no_grammar_and_no_neighbour_changes_a_token(wanted, num_blocks, mode, speculative, costs):
    """Memory is short, so sequences are preempted between a pass and its draw too."""
    requests = []
    for number, (prompt, max_tokens, width, is_constrained, length) in enumerate(wanted):
        tokens = [number, *range(prompt)]
        if is_constrained:
            requests.append(constrained_request(tokens, max_tokens, ending(length, with_runs), width=width))
        else:
            requests.append(make_request(tokens, max_tokens, width=width))
    num_blocks = max(num_blocks, *(len(r.sequences) * ((r.max_total_tokens + 3) // 4 + 1) for r in requests), 1)
    swap_blocks = num_blocks if mode == "swap" else 0
    options = {"preemption_mode": mode, "swap_blocks": swap_blocks, "speculative": speculative, "costs": costs}
    scheduler = make_scheduler(num_blocks, prefix_caching=True, **options)
    Loop(scheduler).run(*requests)
    for request, (*_, is_constrained, length) in zip(requests, wanted, strict=True):
        if is_constrained:
            assert outputs(request) == constrained_alone(request, GROUPS, ending(length, with_runs))
        else:
            expected = [alone(request, GROUPS, index=index)[0] for index in range(len(request.sequences))]
            assert outputs(request) == expected


def two_free_then_four_forced(tokens):
    """Repeats itself, so that n-grams find drafts whose first token is not the one that is drawn."""
    place = len(tokens) % 6
    return {2, 3, 4, 5} if place < 2 else {6 + place}


@pytest.mark.parametrize("last", range(6))
def test_a_forced_run_waits_for_the_drafts_that_are_verified_with_it(last):
    request = constrained_request([1, 2, last], 60, two_free_then_four_forced)
    costs = StepCosts(token=0.02, verifying=0.15, tile=0.2)
    Loop(make_scheduler(256, speculative=NGram(8), costs=costs, prefix_caching=True)).run(request)
    assert outputs(request) == constrained_alone(request, GROUPS, two_free_then_four_forced)
