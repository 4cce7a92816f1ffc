"""Adapters are loaded before the step that needs them, shared, evicted as a whole, and never keep anybody waiting for
good."""

from __future__ import annotations

import numpy as np
import pytest
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone

from jpaged.memory import Adapters, GroupSpec
from jpaged.scheduling.inputs import Adapter, asks_for

FULL = group("full", layer_bytes=4)
SIZES = {"large": 8, "small": 2}
"""Bytes of a block of adapters. A large page holds two blocks of four tokens, or a large one of adapters; or one block
of tokens, or two small ones of adapters, which may lie scattered."""


def adapter(name: str, blocks: int) -> Adapter:
    return Adapter(name, f"{name} {blocks}".encode(), np.zeros((1, blocks, 8), np.uint8), (blocks,))


def with_adapter(chosen: Adapter | None, prompt, max_tokens=4, **options):
    request = make_request(prompt, max_tokens, **options)
    request.asks = asks_for(adapter=chosen)
    return request


def expected(request, index=0):
    """Return what the request generates alone, all of whose tokens go through its adapter."""
    chosen = request.asks.get("adapters")
    if chosen is None:
        return alone(request, [FULL], index=index)
    content = tuple((chosen.digest, number) for number in range(chosen.num_blocks))
    return alone(request, [FULL], index=index, show=lambda at, token: (token, content))


def loop_of(num_pages=32, places=2, size="large", **options):
    groups = [FULL, GroupSpec("adapters", SIZES[size], 1, 1, Adapters(places))]
    return Loop(make_scheduler(num_pages, groups=groups, prefix_caching=True, **options))


def assert_right(requests):
    for request in requests:
        for seq in request.sequences:
            assert seq.output_token_ids == expected(request, seq.index)[0]


def test_one_adapter_is_loaded_once_for_all_that_run_with_it_and_stays():
    loop, chosen = loop_of(), adapter("a", 3)
    requests = [with_adapter(chosen, [1 + i, 2, 3]) for i in range(4)]
    steps = loop.run(*requests)
    more = loop.run(later := with_adapter(chosen, [9, 9]))
    assert [len(step.work_of("loads")) for step in steps if step.work_of("loads")] == [1] and not any(
        step.work_of("loads") for step in more
    )
    assert_right([*requests, later])
    assert loop.num_used_blocks == 0


def test_an_adapter_is_evicted_for_tokens_and_read_again():
    loop, chosen = loop_of(10), adapter("a", 4)
    loop.run(first := with_adapter(chosen, [1, 2, 3]))
    loop.run(long := with_adapter(None, [5] * 40, 30))
    steps = loop.run(again := with_adapter(chosen, [3, 2, 1]))
    assert sum(len(step.work_of("loads")) for step in steps) == 1
    assert_right([first, long, again])


def test_a_request_whose_adapter_has_no_place_in_the_step_waits_and_so_do_those_behind_it():
    loop = loop_of(places=1)
    requests = [with_adapter(adapter(name, 1), [1, 2, 3], 6) for name in ("a", "b", "a")]
    for request in requests:
        loop.scheduler.add(request)
    step = loop.step()
    assert [use.adapter.name for use in step.rows["adapters"]] == ["a"]
    loop.run()
    assert_right(requests)


def test_no_prefix_is_found_under_another_adapter_or_none():
    loop, prompt = loop_of(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    requests = [with_adapter(chosen, prompt) for chosen in (None, adapter("a", 1), adapter("b", 1), adapter("a", 1))]
    for request in requests:
        loop.run(request)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 8]
    assert_right(requests)


def test_a_request_that_could_never_fit_beside_its_adapter_is_refused():
    loop = loop_of(8)
    with pytest.raises(ValueError, match="can never fit the pool"):
        loop.scheduler.add(with_adapter(adapter("a", 6), [1] * 20, 10))
    loop.run(fits := with_adapter(adapter("a", 6), [1] * 10, 6))
    assert_right([fits])


def test_what_is_aborted_before_its_adapter_was_loaded_leaves_nothing():
    loop, chosen = loop_of(), adapter("a", 3)
    request = with_adapter(chosen, [1, 2, 3])
    loop.scheduler.add(request)
    loop.scheduler.schedule()
    loop.scheduler.abort(request)
    loop.scheduler.memory.check_invariants()
    assert loop.num_used_blocks == 0
    loop.run(later := with_adapter(chosen, [1, 2, 3]))
    assert_right([later])


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([None, ("a", 1), ("b", 3), ("c", 4)]),
        st.integers(1, 14),
        st.integers(1, 10),
        st.integers(1, 3),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    asked=REQUESTS,
    pages=st.integers(14, 24),
    places=st.integers(1, 3),
    size=st.sampled_from(sorted(SIZES)),
    budget=st.sampled_from([8, 24]),
    mode=st.sampled_from(["recompute", "swap", "auto"]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_any_mixture_ends_with_the_tokens_of_each_alone(asked, pages, places, size, budget, mode, policy):
    swap = 0 if mode == "recompute" else pages
    loop = loop_of(
        pages, places, size, budget=budget, swap_blocks=swap, preemption_mode=mode, policy=policy, max_num_seqs=6
    )
    requests = []
    for chosen, length, max_tokens, width, rank in asked:
        made = with_adapter(
            None if chosen is None else adapter(*chosen),
            [i % 5 for i in range(length)],
            max_tokens,
            width=width,
            priority=rank if policy == "priority" else None,
        )
        try:
            loop.scheduler.add(made)
            requests.append(made)
        except ValueError as error:
            assert "can never fit the pool" in str(error)
    loop.run()
    assert_right(requests)
    assert loop.num_used_blocks == 0
