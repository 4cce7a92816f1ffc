"""Random requests on tiny pools: whatever is batched, chunked, preempted or cached, the tokens are those of each
request alone."""

from __future__ import annotations

from dataclasses import replace

from arrivals import GROUPS, drawn_arrivals, in_order, pages_for, serve
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import make_scheduler
from thorough import examples
from unpaged import alone, alone_beams


@settings(max_examples=examples(600), deadline=None)
@given(
    arrivals=drawn_arrivals,
    groups=st.sampled_from(sorted(GROUPS)),
    spare_pages=st.integers(0, 4),
    max_num_seqs=st.integers(2, 8),
    extra_budget=st.integers(0, 12),
    tail=st.integers(1, 8),
    watermark=st.sampled_from([0.0, 0.01, 0.2]),
    prefix_caching=st.booleans(),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    swap_blocks=st.integers(1, 4),
    priorities=st.sampled_from([None, None, (0, 1, 2), (2, 1, 0), (1, 0)]),
)
def test_every_request_gets_the_tokens_it_would_get_alone(
    arrivals,
    groups,
    spare_pages,
    max_num_seqs,
    extra_budget,
    tail,
    watermark,
    prefix_caching,
    preemption_mode,
    swap_blocks,
    priorities,
):
    specs = GROUPS[groups]
    if groups == "budgets":
        tail = min(tail, 1 + extra_budget)
        specs = [replace(spec, policy=replace(spec.policy, prompt_tail=tail)) for spec in specs]
    options = {
        "groups": specs,
        "max_num_seqs": max_num_seqs,
        "budget": max_num_seqs + extra_budget,
        "watermark": watermark,
        "prefix_caching": prefix_caching,
    }
    num_pages = pages_for(arrivals, options) + spare_pages
    options |= {"preemption_mode": preemption_mode, "swap_blocks": min(swap_blocks, num_pages)}
    options["policy"] = "fcfs" if priorities is None else "priority"
    scheduler = make_scheduler(num_pages, **options)
    loop = Loop(scheduler)
    coming = in_order(arrivals)
    if priorities is not None:
        for number, arrival in enumerate(coming):
            arrival.request.priority = priorities[number % len(priorities)]
    accepted, aborted = serve(loop, coming)

    for request in accepted:
        if request.beam is not None:
            if request.request_id not in aborted:
                found = [(s.output_token_ids, s.score, s.finish_reason) for s in request.sequences]
                want = [(h.token_ids, h.score, h.finish_reason) for h in alone_beams(request, specs)]
                assert found == want
            continue
        for seq in request.sequences:
            tokens, reason = alone(request, specs, index=seq.index)
            if seq.finish_reason == "abort":
                assert request.request_id in aborted
                assert seq.output_token_ids == tokens[: seq.num_output]
            else:
                assert (seq.output_token_ids, seq.finish_reason) == (tokens, reason)
        assert request.request_id in aborted or request in loop.finished
    assert len(loop.finished) == len(set(map(id, loop.finished)))
    assert loop.num_used_blocks == 0
    loop.step()  # tells the device what was dropped last
    assert not loop.device.host
    assert sorted(scheduler.allocation.free_rows) == list(range(max_num_seqs))
    assert all(s.num_pending == 0 for request in accepted for s in request.sequences)
