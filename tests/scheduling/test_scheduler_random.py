"""Random requests on tiny pools: whatever is batched, chunked, preempted or cached, the tokens are those of each
request alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from fake_device import Loop, alone, alone_beams, group, make_request, make_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.memory import Fit
from jpaged.sampling_params import BeamSearchParams

# Byte sizes whose least common multiple puts several blocks of each group into a large page.
GROUPS = {
    "full": [group("full")],
    "window": [group("window", window=6)],
    "both": [
        group("full", block_size=2, layer_bytes=3),
        group("window", window=5, block_size=2, layer_bytes=2),
    ],
    "budgets": [
        group("low", budget=8, layer_bytes=3),
        group("high", budget=2, block_size=2, layer_bytes=2),
    ],
    "states": [group("state", interval=8)],
    "hybrid": [
        group("full", block_size=2, layer_bytes=3),
        group("window", window=5, block_size=2, layer_bytes=2),
        group("state", interval=6, block_size=2, layer_bytes=9),
    ],
    "sizes": [
        group("full", block_size=4, layer_bytes=4),
        group("window", window=3, block_size=2, layer_bytes=6),
    ],
}

arrivals = st.lists(
    st.tuples(
        st.integers(0, 4),  # step of arrival
        st.integers(1, 24),  # prompt tokens
        st.integers(0, 2),  # which prompt
        st.integers(1, 30),  # max_tokens
        st.sampled_from([(), (), (3,), (3, 7)]),  # end-of-sequence ids
        st.integers(0, 9),  # min_tokens
        st.sampled_from([None] * 5 + [0, 1, 3, 8, 20]),  # steps until it is aborted
        st.sampled_from([1, 1, 2, 3, 4]),  # outputs
        st.sampled_from([None, None, False, True, "never"]),  # early_stopping of a beam search, None for a sampled one
    ),
    min_size=4,
    max_size=10,
)


def pages_for(arrivals, options) -> int:
    """Pages that hold the request of median size alone: most tests preempt, some requests are refused."""
    widths = [min(arrival[7], options["max_num_seqs"]) for arrival in arrivals]
    sizes = zip(((length, length + most) for _, length, _, most, *_ in arrivals), widths, strict=True)
    (prompt, total), width = sorted(sizes, key=lambda size: size[0][1] * size[1])[len(arrivals) // 2]

    def fits(num_pages: int) -> bool:
        memory = make_scheduler(num_pages, **options).memory
        return memory.can_admit(total, width, shared_tokens=prompt, prompt_tokens=prompt) is not Fit.NEVER

    return next(n for n in count(1) if fits(n))


@settings(max_examples=examples(600), deadline=None)
@given(
    arrivals=arrivals,
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
    todo, accepted, aborted = sorted(arrivals, key=lambda a: a[0]), [], set()
    total = 0
    for now in range(20_000):
        while todo and todo[0][0] <= now:
            _, length, which, max_tokens, eos, min_tokens, patience, n, early_stopping = todo.pop(0)
            prompt = [(which * 5 + i * i) % 11 for i in range(length)]
            if early_stopping is None:
                request = make_request(prompt, max_tokens, eos=eos, min_tokens=min(min_tokens, max_tokens), width=n)
            else:
                request = make_request(prompt, eos=eos, beam=BeamSearchParams(n, max_tokens, 0.5, early_stopping))
            if priorities is not None:
                request.priority = priorities[len(todo) % len(priorities)]
            try:
                scheduler.add(request)
            except ValueError:
                continue
            total += request.max_total_tokens * n
            accepted.append((request, None if patience is None else now + patience))
        for request, when in accepted:
            if when == now:
                scheduler.abort(request)
                aborted.add(request.request_id)
        if not (todo or scheduler.has_work or loop.in_flight):
            break
        loop.step()
        assert now < 50 + 40 * total, "it does not end"

    for request, _ in accepted:
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
    assert sorted(scheduler.allocation.free_slots) == list(range(max_num_seqs))
    assert all(s.num_pending == 0 for request, _ in accepted for s in request.sequences)
