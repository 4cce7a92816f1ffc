"""Sequences with a grammar take part in every step, with the tokens that they draw alone."""

from __future__ import annotations

from collections import Counter

from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rules import changing, constrained_alone, constrained_request
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone

from jpaged.speculative import NGram

GROUPS = [group()]


def ending(length: int):
    """Return a grammar that is complete after so many tokens."""
    return lambda tokens: changing(tokens) if len(tokens) < length else set()


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


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 12), st.integers(1, 3), st.booleans(), st.integers(1, 14)),
        min_size=1,
        max_size=6,
    ),
    st.integers(6, 24),
    st.sampled_from(["recompute", "swap"]),
    st.sampled_from([None, NGram(2)]),
)
def test_no_grammar_and_no_neighbour_changes_a_token(wanted, num_blocks, mode, speculative):
    """Memory is short, so sequences are preempted between a pass and its draw too."""
    requests = []
    for number, (prompt, max_tokens, width, is_constrained, length) in enumerate(wanted):
        tokens = [number, *range(prompt)]
        if is_constrained:
            requests.append(constrained_request(tokens, max_tokens, ending(length), width=width))
        else:
            requests.append(make_request(tokens, max_tokens, width=width))
    num_blocks = max(num_blocks, *(len(r.sequences) * ((r.max_total_tokens + 3) // 4 + 1) for r in requests), 1)
    swap_blocks = num_blocks if mode == "swap" else 0
    options = {"preemption_mode": mode, "swap_blocks": swap_blocks, "speculative": speculative}
    scheduler = make_scheduler(num_blocks, prefix_caching=True, **options)
    Loop(scheduler).run(*requests)
    for request, (*_, is_constrained, length) in zip(requests, wanted, strict=True):
        if is_constrained:
            assert outputs(request) == constrained_alone(request, GROUPS, ending(length))
        else:
            expected = [alone(request, GROUPS, index=index)[0] for index in range(len(request.sequences))]
            assert outputs(request) == expected
