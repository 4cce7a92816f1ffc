"""Drafts on the made-up device: verified beside other requests, kept where they are what is drawn, else forgotten."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from arrivals import GROUPS, Arrival, drawn_arrivals, pages_for, serve
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone, hash_model, is_ring

from jpaged.sampling_params import BeamSearchParams
from jpaged.speculative import NGram

ALWAYS = NGram(tokens=5, longest=3, shortest=1)
MOST_TOKENS = 7
DRAFTED = {name: groups for name, groups in GROUPS.items() if name not in ("budgets", "states", "hybrid")}
"""Groups that a step can verify drafts with: not those with a budget for the prompt, which the engine refuses."""
DRAFTED |= {
    "states": [*GROUPS["states"], group("state.verified", slots=MOST_TOKENS + 1)],
    "hybrid": [
        *GROUPS["hybrid"],
        group("state.verified", slots=MOST_TOKENS + 1, block_size=2, layer_bytes=9),
    ],
}


def few_tokens(name: Hashable) -> int:
    """Two tokens in a random order, so that drafts are found everywhere and kept half of the time."""
    return 3 + hash(("few", name)) % 2


def in_circles(name: Hashable) -> int:
    """One token for ever: every draft is kept."""
    return 5


def test_kept_drafts_save_steps():
    requests = [make_request([5, 6, 5], 40) for _ in range(2)]
    steps = Loop(make_scheduler(speculative=ALWAYS, max_num_seqs=16), in_circles).run(*requests)
    assert [r.sequences[0].output_token_ids for r in requests] == [[5] * 40] * 2
    assert len([step for step in steps if step.chunks]) <= 10


def test_without_drafts_that_are_kept_soon_none_are_made():
    """A sequence that never repeats itself runs ahead of the host as without speculation."""
    scheduler = make_scheduler(speculative=ALWAYS, budget=64)
    request = make_request(range(20, 60), 60)
    numbers = iter(range(100, 1000))
    steps = Loop(scheduler, lambda name: next(numbers)).run(request)
    assert scheduler.speculation.num_drafted == 0
    assert all(chunk.source_row >= 0 for step in steps[1:] for chunk in step.chunks)


def test_drafts_of_the_only_slot_take_rows_of_their_own_while_others_wait():
    scheduler = make_scheduler(speculative=ALWAYS, max_num_seqs=1, num_rows=6, budget=64)
    requests = [make_request([5, 6, 5], 40) for _ in range(2)]
    steps = Loop(scheduler, in_circles).run(*requests)
    assert [r.sequences[0].output_token_ids for r in requests] == [[5] * 40] * 2
    assert max(len(step.samples) for step in steps) == 6 and max(len(step.chunks) for step in steps) == 1


def test_a_step_verifies_no_more_drafts_than_the_sampler_has_rows_left():
    scheduler = make_scheduler(speculative=ALWAYS, max_num_seqs=4, budget=64)
    requests = [make_request([5] * 4, 30) for _ in range(3)]
    steps = Loop(scheduler, in_circles).run(*requests)
    assert max(len(step.samples) for step in steps) == 4
    assert sum(len(chunk.drafts) for step in steps for chunk in step.chunks) > 0


def runs_ahead(step) -> bool:
    """Whether a step takes every token from the step before, as it was planned before the host had them."""
    return all(chunk.source_row >= 0 for chunk in step.chunks)


def test_a_full_batch_runs_ahead_of_the_host_until_there_are_rows_for_drafts():
    requests = [make_request([5] * 4, 40 if i else 20) for i in range(4)]
    scheduler = make_scheduler(speculative=ALWAYS, max_num_seqs=4, budget=64)
    loop = Loop(scheduler, in_circles)
    steps = [step for step in loop.run(*requests) if step.chunks]
    full = [step for step in steps if len(step.chunks) == 4]
    assert len(full) >= 20 and all(map(runs_ahead, full[1:]))
    assert scheduler.speculation.num_accepted > 10, "the others wait for drafts once one has ended"
    assert [len(request.sequences[0].output_token_ids) for request in requests] == [20, 40, 40, 40]


def test_nobody_awaits_the_host_while_a_request_waits_for_memory():
    running, waits = make_request([5] * 5, 27), make_request(28, 4)  # two blocks at once, and seven of eight
    scheduler = make_scheduler(8, speculative=ALWAYS)
    loop = Loop(scheduler, in_circles)
    scheduler.add(running)
    scheduler.add(waits)
    steps = [loop.step() for _ in range(27)]
    assert all(map(runs_ahead, steps[1:])) and not scheduler.speculation.num_drafted
    loop.run()
    assert loop.finished == [running, waits]


def test_nobody_awaits_the_host_who_has_the_pool_to_itself():
    request = make_request([5] * 4, 30)
    scheduler = make_scheduler(speculative=ALWAYS)
    loop = Loop(scheduler, in_circles)
    scheduler.add(request)
    loop.step()
    request.runs_exclusively = True
    steps = [loop.step() for _ in range(15)]
    assert all(step.chunks and runs_ahead(step) for step in steps) and not scheduler.speculation.num_drafted


def test_a_request_never_computes_beyond_its_last_token():
    for most in range(1, 9):
        request = make_request([5] * 6, most)
        steps = Loop(make_scheduler(speculative=ALWAYS), in_circles).run(request)
        assert max(chunk.start + chunk.length for step in steps for chunk in step.chunks) < request.max_total_tokens
        assert len(request.sequences[0].output_token_ids) == most


def test_lost_drafts_never_enter_the_prefix_cache():
    """Whoever shares a prefix later reads the KV of the tokens it has, not of drafts that lay in the same slots."""
    scheduler = make_scheduler(speculative=ALWAYS, prefix_caching=True)
    loop = Loop(scheduler, few_tokens)
    first = make_request([3, 4, 3, 3, 4], 40)
    loop.run(first)
    lost = scheduler.speculation.num_drafted - scheduler.speculation.num_accepted
    again = make_request(first.sequences[0].token_ids[:-3], 12)
    loop.run(again)
    assert lost > 5 and again.num_cached_tokens >= 36
    assert again.sequences[0].output_token_ids == alone(again, [group()], few_tokens)[0]
    other = make_request([*first.sequences[0].token_ids[:20], 9, 9, 9], 12)
    loop.run(other)
    assert other.sequences[0].output_token_ids == alone(other, [group()], few_tokens)[0]


def test_nobody_is_preempted_for_a_draft():
    requests = [make_request([5] * 4, 12) for _ in range(2)]
    scheduler = make_scheduler(8, speculative=ALWAYS)
    Loop(scheduler, in_circles).run(*requests)
    assert scheduler.num_preemptions == 0


def test_the_others_do_not_run_ahead_while_drafts_are_verified():
    """A step without the sequence that awaits the host would cost as much as one with it."""
    drafting, plain = make_request([5] * 8, 30), make_request(range(20, 28), 30)
    loop = Loop(make_scheduler(speculative=ALWAYS), lambda name: 5)
    steps = [step for step in loop.run(drafting, plain) if step.chunks]
    for step in steps:
        if any(chunk.drafts for chunk in step.chunks) and not (drafting.sequences[0].finished):
            assert len(step.chunks) == 2


@pytest.mark.parametrize("beam_width", [2, 3])
def test_beams_go_without_drafts(beam_width):
    scheduler = make_scheduler(speculative=ALWAYS)
    beams = make_request([5] * 6, beam=BeamSearchParams(beam_width=beam_width, max_tokens=8))
    steps = Loop(scheduler, in_circles).run(beams)
    assert not any(chunk.drafts for step in steps for chunk in step.chunks)


@settings(max_examples=examples(300), deadline=None)
@given(
    arrivals=drawn_arrivals,
    groups=st.sampled_from(sorted(DRAFTED)),
    spare_pages=st.integers(0, 6),
    max_num_seqs=st.integers(2, 8),
    extra_budget=st.integers(0, 24),
    prefix_caching=st.booleans(),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    swap_blocks=st.integers(1, 4),
    model=st.sampled_from([few_tokens, in_circles, hash_model]),
    tokens=st.integers(1, MOST_TOKENS),
    longest=st.integers(1, 3),
)
def test_outputs_with_drafts_are_those_without(
    arrivals,
    groups,
    spare_pages,
    max_num_seqs,
    extra_budget,
    prefix_caching,
    preemption_mode,
    swap_blocks,
    model,
    tokens,
    longest,
):
    computed = [spec for spec in DRAFTED[groups] if not is_ring(spec)]
    options = {
        "groups": DRAFTED[groups],
        "max_num_seqs": max_num_seqs,
        "budget": max_num_seqs + extra_budget,
        "prefix_caching": prefix_caching,
    }
    num_pages = pages_for(arrivals, options) + spare_pages
    options |= {"preemption_mode": preemption_mode, "swap_blocks": min(swap_blocks, num_pages)}
    scheduler = make_scheduler(num_pages, speculative=NGram(tokens=tokens, longest=longest), **options)
    loop, coming = Loop(scheduler, model), []
    for one in arrivals:
        prompt = [(3, 4, 5)[(one.which + i) % 3] for i in range(one.length)]
        least, width = min(one.min_tokens, one.max_tokens), min(one.width, max_num_seqs)
        request = make_request(prompt, one.max_tokens, eos=one.eos, min_tokens=least, width=width)
        coming.append(Arrival(one.when, request, one.patience))
    accepted, _ = serve(loop, coming)
    for request in accepted:
        for seq in request.sequences:
            want, reason = alone(request, computed, model, seq.index)
            if seq.finish_reason == "abort":
                assert want[: len(seq.output_token_ids)] == seq.output_token_ids
            else:
                assert (seq.output_token_ids, seq.finish_reason) == (want, reason)
    assert loop.num_used_blocks == 0
