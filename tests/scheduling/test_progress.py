"""Whatever is accepted ends: alone in a number of steps linear in its length, and together with others."""

from __future__ import annotations

from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone

from jpaged.memory import ChunkedLocalAttention, FullAttention, GroupSpec, Policy, SlidingWindow, StateCheckpoints
from jpaged.scheduling import Request, Scheduler

WIDE_WINDOW = [group("full", layer_bytes=8), group("window", window=10, layer_bytes=3)]
"""A large page holds 3 blocks of the full group, or 8 of the window's."""


def steps_alone(scheduler: Scheduler, request: Request) -> int:
    """Steps until a request that has the engine to itself has ended, without a device."""
    scheduler.add(request)
    before, steps = None, 0
    while scheduler.has_work or before is not None:
        step = scheduler.schedule()
        scheduler.dispatched(step)
        if before is not None:
            scheduler.update(before, [steps % 7 for _ in before.samples], [-0.5] * len(before.samples))
        before = step if step.chunks else None
        steps += 1
        scheduler.memory.check_invariants()
        assert steps <= 10 + 4 * request.max_total_tokens, "it does not end"
    return steps


def test_window_blocks_that_straddle_pages_never_keep_a_lone_request_from_its_end():
    loop = Loop(make_scheduler(5, groups=WIDE_WINDOW, budget=12, prefix_caching=True))
    request = make_request(range(40), 8)
    loop.run(request, most_steps=60)
    assert request.num_preemptions == 0
    assert request.sequences[0].output_token_ids == alone(request, WIDE_WINDOW)[0]


def test_hits_that_lie_scattered_cost_a_lone_request_one_preemption_at_most():
    loop = Loop(make_scheduler(5, groups=WIDE_WINDOW, budget=12, prefix_caching=True))
    for start in (0, 7, 3):
        loop.run(make_request(range(start, start + 30), 6))
    for prompt in (range(40), range(3, 42), range(7, 45)):
        request = make_request(prompt, 48 - len(prompt))
        loop.run(request, most_steps=120)
        assert request.num_preemptions <= 1
        assert request.sequences[0].output_token_ids == alone(request, WIDE_WINDOW)[0]


policies = st.one_of(
    st.just(FullAttention()),
    st.builds(SlidingWindow, st.integers(1, 20)),
    st.builds(ChunkedLocalAttention, st.integers(1, 20)),
    st.builds(StateCheckpoints, st.integers(1, 5)),  # in blocks
)


def in_tokens(policy: Policy, block_size: int) -> Policy:
    """A policy of which the interval of checkpoints, if it has any, is given in blocks."""
    return StateCheckpoints(policy.interval * block_size) if isinstance(policy, StateCheckpoints) else policy


specs = st.lists(
    st.tuples(policies, st.integers(1, 8), st.integers(1, 5)),  # policy, bytes a layer, block size
    min_size=1,
    max_size=3,
).map(
    lambda groups: [
        GroupSpec(f"group {i}", layer_bytes, 1, block_size, in_tokens(policy, block_size))
        for i, (policy, layer_bytes, block_size) in enumerate(groups)
    ]
)


def smallest_pool(request: Request, **options) -> int:
    """The fewest large pages with which a request is accepted."""
    pages = 1
    while True:
        try:
            make_scheduler(pages, **options).add(request)
        except ValueError:
            pages += 1
        else:
            return pages


@settings(max_examples=examples(300), deadline=None)
@given(
    groups=specs,
    prompt=st.integers(1, 50),
    max_tokens=st.integers(1, 30),
    width=st.sampled_from([1, 1, 1, 2, 3]),
    extra_budget=st.integers(0, 20),
    threshold=st.integers(0, 12),
    spare_pages=st.integers(0, 3),
    watermark=st.sampled_from([0.0, 0.1]),
    prefix_caching=st.sampled_from([True, True, False]),
    preemption_mode=st.sampled_from(["recompute", "swap", "auto"]),
    earlier=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=3),
)
def test_whatever_is_accepted_ends_alone_in_steps_linear_in_its_length(
    groups,
    prompt,
    max_tokens,
    width,
    extra_budget,
    threshold,
    spare_pages,
    watermark,
    prefix_caching,
    preemption_mode,
    earlier,
):
    def requested() -> Request:
        return make_request([i % 11 for i in range(prompt)], max_tokens, width=width)

    options = {
        "groups": groups,
        "budget": 3 + extra_budget,
        "max_num_seqs": 3,
        "watermark": watermark,
        "prefix_caching": prefix_caching,
        "long_prefill_token_threshold": threshold,
    }
    pages = smallest_pool(requested(), **options) + spare_pages
    scheduler = make_scheduler(pages, preemption_mode=preemption_mode, swap_blocks=pages, **options)
    for start, length in earlier:  # what these leave in the cache lies where it may
        try:
            steps_alone(scheduler, make_request([i % 11 for i in range(start, start + length)], 3))
        except ValueError:
            continue
    request = requested()
    steps_alone(scheduler, request)
    assert request.num_preemptions <= 1
    assert scheduler.memory.num_used_blocks == 0


@settings(max_examples=examples(150), deadline=None)
@given(
    groups=specs,
    requests=st.lists(
        st.tuples(
            st.integers(1, 30),
            st.integers(1, 20),
            st.sampled_from([1, 1, 2, 3]),
            st.integers(0, 2),  # priority
            st.integers(0, 12),  # step of arrival
        ),
        min_size=2,
        max_size=6,
    ),
    extra_budget=st.integers(0, 12),
    policy=st.sampled_from(["fcfs", "priority"]),
    prefix_caching=st.booleans(),
    preemption_mode=st.sampled_from(["recompute", "swap", "auto"]),
    host_share=st.sampled_from([1.0, 0.3]),
    spare_pages=st.integers(0, 3),
)
def test_whatever_is_accepted_ends_beside_others(
    groups, requests, extra_budget, policy, prefix_caching, preemption_mode, host_share, spare_pages
):
    options = {"groups": groups, "budget": 4 + extra_budget, "max_num_seqs": 4, "prefix_caching": prefix_caching}
    made = [
        (
            make_request(
                [i % 11 for i in range(length)],
                most,
                width=width,
                priority=priority if policy == "priority" else None,
            ),
            arrival,
        )
        for length, most, width, priority, arrival in requests
    ]
    pages = max(smallest_pool(request, policy=policy, **options) for request, _ in made) + spare_pages
    swap_blocks = int(pages * host_share)
    scheduler = make_scheduler(
        pages, policy=policy, preemption_mode=preemption_mode, swap_blocks=swap_blocks, **options
    )
    total = sum(request.max_total_tokens * len(request.sequences) for request, _ in made)
    before, now = None, 0
    while made or scheduler.has_work or before is not None:
        for request, _ in [pair for pair in made if pair[1] <= now]:
            scheduler.add(request)
        made = [pair for pair in made if pair[1] > now]
        step = scheduler.schedule()
        scheduler.dispatched(step)
        if before is not None:
            scheduler.update(before, [now % 7 for _ in before.samples], [-0.5] * len(before.samples))
        before = step if step.chunks else None
        now += 1
        scheduler.memory.check_invariants()
        assert now <= 50 + 20 * total, "it does not end"
    assert scheduler.memory.num_used_blocks == 0
