"""Blocks that the pool lost come back from disk before the step that reads them, and change no token."""

from __future__ import annotations

import pytest
from arrivals import GROUPS, Drawn, in_order, pages_for
from arrivals import serve as arrivals_served
from fake_device import Loop
from fake_store import FakeStore
from hypothesis import event, given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone

from jpaged.memory.tiers import BreakEven, prefetch
from jpaged.scheduling import Request, tier_prefetch

FULL = [group()]
PROMPT = [*range(1, 10), 3, 1, 4, 1, 5, 9, 2, 6]  # 17 tokens: four full blocks and one more token


@pytest.fixture(scope="module", autouse=True)
def no_stops():
    """A fake disk goes on with the device's steps and not with the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_prefetch, "LONGEST_STOP", 0.0)
        yield


def disk_loop(num_blocks: int = 8, *, delay: int = 0, **options) -> Loop:
    options = {"prefix_caching": True, "max_num_seqs": 2} | options
    return Loop(make_scheduler(num_blocks, disk=FakeStore(delay), **options))


def others(number: int = 3) -> list[Request]:
    """Requests that fill a pool of eight blocks."""
    return [make_request([7 + which] * 20, 4) for which in range(number)]


def check_tokens(request: Request, groups=FULL) -> None:
    for seq in request.sequences:
        assert (seq.output_token_ids, seq.finish_reason) == alone(request, groups, index=seq.index)


def serve(loop: Loop, *requests: Request) -> None:
    for request in requests:
        loop.run(request)
        check_tokens(request)


def test_a_prompt_that_the_pool_lost_is_read_instead_of_computed():
    loop = disk_loop()
    again = make_request(PROMPT, 4)
    serve(loop, make_request(PROMPT, 4), *others())
    disk = loop.scheduler.memory.tiers
    assert disk.stats()["disk"].num_blocks > 0 and disk.stats()["disk"].hits == 0
    serve(loop, again)
    assert again.num_cached_tokens == 16
    assert disk.stats()["disk"].hits == 16 and loop.device.stores[0].num_read == 4
    assert loop.num_used_blocks == 0


def test_what_is_on_disk_already_is_not_written_again():
    loop = disk_loop()
    serve(loop, make_request(PROMPT, 4), *others(), make_request(PROMPT, 4))
    serve(loop, *others())  # read from disk too, and evict the prompt once more
    serve(loop, make_request(PROMPT, 4))
    assert loop.device.stores[0].num_read > 8
    assert (
        loop.device.stores[0].num_written == loop.scheduler.memory.tiers.stats()["disk"].num_blocks == 20
    )  # 5 of each prompt


def test_while_a_request_waits_for_its_blocks_others_run_and_nothing_is_held_for_it():
    loop = disk_loop(delay=3)
    serve(loop, make_request(PROMPT, 4), *others())
    running, waiting = make_request([5] * 6, 12), make_request(PROMPT, 4)
    loop.scheduler.add(running)
    loop.step()
    used = loop.num_used_blocks
    loop.scheduler.add(waiting)
    assert loop.device.stores[0].reads, "reading begins when the request is queued"
    assert loop.num_used_blocks == used
    steps = [loop.step() for _ in range(2)]
    assert all(chunk.seq is running.sequences[0] for step in steps for chunk in step.chunks)
    loop.run()
    check_tokens(running)
    check_tokens(waiting)
    assert waiting.num_cached_tokens == 16


def test_an_abort_while_blocks_are_read_leaves_nothing_behind():
    loop = disk_loop(delay=100)
    serve(loop, make_request(PROMPT, 4), *others())
    request = make_request(PROMPT, 4)
    loop.scheduler.add(request)
    (_, read) = loop.device.stores[0].reads[0]
    loop.step()
    loop.scheduler.abort(request)
    assert read.is_cancelled and loop.num_used_blocks == 0 and not loop.scheduler.has_work
    loop.device.stores[0].reads.clear()
    loop.device.stores[0].delay = 0
    serve(loop, make_request(PROMPT, 4))
    loop.scheduler.memory.check_invariants()


def test_damaged_blocks_are_computed_and_forgotten():
    loop = disk_loop()
    serve(loop, make_request(PROMPT, 4), *others())
    kept = loop.device.stores[0].kept
    for place, (_, content) in list(kept.items()):
        kept[place] = b"another name", content
    again = make_request(PROMPT, 4)
    serve(loop, again)
    assert again.num_cached_tokens == 0
    stats = loop.scheduler.memory.tiers.stats()["disk"]
    assert stats.hits == 0 and stats.failures == 4


def test_a_read_that_does_not_end_is_given_up():
    loop = disk_loop(delay=10**9)
    serve(loop, make_request(PROMPT, 4), *others())
    now = [0.0]
    loop.scheduler.tier_prefetch._clock = lambda: now[0]
    again = make_request(PROMPT, 4)
    loop.scheduler.add(again)
    assert not loop.step().chunks
    now[0] = prefetch.LONGEST_WAIT + 1
    loop.run()
    check_tokens(again)
    assert again.num_cached_tokens == 0 and loop.scheduler.memory.tiers.stats()["disk"].failures == 1
    another = make_request([8] * 20, 4)
    serve(loop, another)  # does not wait as long for the same disk
    assert another.num_cached_tokens == 0 and loop.scheduler.memory.tiers.stats()["disk"].failures == 1
    loop.device.stores[0].reads[0][1].finish()
    loop.device.stores[0].reads.clear()
    loop.device.stores[0].delay = 0
    third = make_request(PROMPT, 4)
    serve(loop, *others(), third)
    assert third.num_cached_tokens == 16


def test_what_is_computed_faster_than_read_is_computed():
    slow = BreakEven(latency=0.0, read_rate=1.0)
    loop = disk_loop(break_even=slow)
    serve(loop, make_request(PROMPT, 4), *others(), make_request(PROMPT, 4))
    assert loop.device.stores[0].num_read == 0
    disk = loop.scheduler.memory.tiers
    for _ in range(3):
        disk.computed(100, 1e-9)
    serve(loop, *others(), make_request(PROMPT, 4))
    assert loop.device.stores[0].num_read == 0 and disk.stats()["disk"].break_even is None
    for _ in range(60):
        disk.computed(1, 100.0)
    again = make_request(PROMPT, 4)
    serve(loop, *others(), again)
    assert again.num_cached_tokens == 16 and disk.stats()["disk"].break_even == 4


def test_steps_with_prompts_tell_what_computing_a_token_takes():
    loop = disk_loop(64, budget=32)
    ticks = iter(range(10**6))
    loop.scheduler.tier_prefetch._clock = lambda: float(next(ticks))
    loop.run(*(make_request([which] * 30, 2) for which in range(4)))
    assert 0 < loop.scheduler.memory.tiers.stats()["disk"].seconds_per_token <= 1


def test_salts_and_prompt_scores_do_not_take_what_is_on_disk():
    loop = disk_loop()
    serve(loop, make_request(PROMPT, 4, cache_salt="a"), *others())
    salted, scored = make_request(PROMPT, 4, cache_salt="b"), make_request(PROMPT, 4, cache_salt="a", prompt_logprobs=0)
    serve(loop, salted, scored)
    assert salted.num_cached_tokens == scored.num_cached_tokens == 0 and loop.device.stores[0].num_read == 0


def test_a_preempted_request_finds_its_blocks_on_disk():
    loop = disk_loop(9, max_num_seqs=3)
    requests = [make_request(list(range(which, which + 12)), 16) for which in range(3)]
    loop.run(*requests)
    for request in requests:
        check_tokens(request)
    assert loop.scheduler.num_preemptions > 0 and loop.scheduler.memory.tiers.stats()["disk"].hits > 0


def test_after_a_failed_step_what_was_sent_before_is_found():
    loop = disk_loop()
    serve(loop, make_request(PROMPT, 4), *others())
    request = make_request(PROMPT, 4)
    loop.scheduler.add(request)
    loop.scheduler.schedule()  # never dispatched
    before = loop.scheduler.memory.tiers.stats()["disk"].num_blocks
    loop.scheduler.restart()
    assert 4 <= loop.scheduler.memory.tiers.stats()["disk"].num_blocks < before, "what was not sent is forgotten"
    loop.run()
    check_tokens(request)
    assert request.num_cached_tokens == 16 and loop.scheduler.memory.tiers.stats()["disk"].failures == 0


def test_a_reset_of_the_prefix_cache_forgets_the_disk():
    loop = disk_loop()
    serve(loop, make_request(PROMPT, 4), *others())
    assert loop.scheduler.memory.reset_prefix_cache()
    again = make_request(PROMPT, 4)
    serve(loop, again)
    assert again.num_cached_tokens == 0


def ram_loop(num_blocks: int = 8, *, delay: int = 0, **options) -> Loop:
    options = {"prefix_caching": True, "max_num_seqs": 2} | options
    return Loop(make_scheduler(num_blocks, ram=FakeStore(delay), **options))


def test_blocks_go_to_host_memory_as_they_fill_and_the_pool_is_asked_first():
    loop = ram_loop(64)
    serve(loop, make_request(PROMPT, 4))
    loop.step()  # the last block filled with the last step
    assert loop.device.stores[0].num_written == 5, "nothing was evicted yet"
    serve(loop, make_request(PROMPT, 4))
    ram = loop.scheduler.memory.tiers.stats()["ram"]
    assert loop.device.stores[0].num_read == 0 == ram.hits


def test_what_the_pool_lost_comes_back_from_host_memory():
    loop = ram_loop()
    again = make_request(PROMPT, 4)
    serve(loop, make_request(PROMPT, 4), *others(), again)
    assert again.num_cached_tokens == 16 and loop.scheduler.memory.tiers.stats()["ram"].hits == 16


def test_a_block_goes_to_host_memory_once_even_where_the_pool_computes_it_again():
    loop = ram_loop(break_even=BreakEven(latency=0.0, read_rate=1.0))  # nothing is worth loading
    for _ in range(3):
        serve(loop, make_request(PROMPT, 4), *others())
    assert loop.device.stores[0].num_written == loop.scheduler.memory.tiers.stats()["ram"].num_blocks == 20


def test_host_memory_comes_before_the_disk_and_gets_what_the_disk_gave():
    loop = disk_loop(ram=FakeStore())
    serve(loop, make_request(PROMPT, 4), *others())
    loop.scheduler.memory.tiers.each[0].clear()
    again = make_request(PROMPT, 4)
    serve(loop, again)
    ram, disk = (loop.scheduler.memory.tiers.stats()[name] for name in ("ram", "disk"))
    assert again.num_cached_tokens == 16 and (ram.hits, disk.hits) == (0, 16)
    serve(loop, *others())  # the pool loses the prompt
    serve(loop, make_request(PROMPT, 4))
    ram, disk = (loop.scheduler.memory.tiers.stats()[name] for name in ("ram", "disk"))
    assert (ram.hits, disk.hits) == (16, 64), "the others came from disk"


def test_swapped_blocks_share_the_bound_of_host_memory():
    loop = ram_loop(9, max_num_seqs=3, ram_pages=9, swap_blocks=9, preemption_mode="swap")
    tiers, least = loop.scheduler.memory.tiers, 9
    requests = [make_request(list(range(which, which + 12)), 16) for which in range(3)]
    for request in requests:
        loop.scheduler.add(request)
    while loop.scheduler.has_work:
        loop.step()
        swapped = loop.scheduler.memory.swap_space.host.used_bytes
        least = min(least, tiers.each[0].index.num_pages)
        assert tiers.stats()["ram"].used_bytes + swapped <= tiers.stats()["ram"].limit_bytes
    for request in requests:
        check_tokens(request)
    assert loop.scheduler.preemption.num_swaps and least < 9
    assert tiers.each[0].index.num_pages == 9, "swapped blocks are gone"


returning = st.lists(
    st.builds(
        Drawn,
        when=st.integers(0, 30),
        length=st.integers(9, 24),
        which=st.integers(0, 3),
        max_tokens=st.integers(1, 8),
        eos=st.sampled_from([(), (3,)]),
        min_tokens=st.just(0),
        patience=st.sampled_from([None] * 5 + [0, 1, 3, 8]),
        width=st.sampled_from([1, 1, 1, 2, 3]),
        early_stopping=st.none(),
    ),
    min_size=8,
    max_size=16,
)
"""Prompts of a few kinds that come back after others: what the pool lost meanwhile is on disk."""


@settings(max_examples=examples(300), deadline=None)
@given(
    arrivals=returning,
    groups=st.sampled_from(sorted(set(GROUPS) - {"budgets"})),
    spare_pages=st.integers(0, 4),
    max_num_seqs=st.integers(2, 8),
    extra_budget=st.integers(0, 12),
    ram_pages=st.sampled_from([0, 2, 5, 1000]),
    disk_pages=st.sampled_from([0, 1, 2, 5, 1000]),
    delay=st.sampled_from([0, 0, 0, 1, 2]),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    priorities=st.sampled_from([None, None, (0, 1, 2), (1, 0)]),
)
def test_whatever_is_read_from_tiers_every_request_gets_the_tokens_it_would_get_alone(
    arrivals, groups, spare_pages, max_num_seqs, extra_budget, ram_pages, disk_pages, delay, preemption_mode, priorities
):
    options = {
        "groups": GROUPS[groups],
        "max_num_seqs": max_num_seqs,
        "budget": max_num_seqs + extra_budget,
        "prefix_caching": True,
    }
    num_pages = pages_for(arrivals, options) + spare_pages
    options |= {"preemption_mode": preemption_mode, "swap_blocks": min(2, num_pages)}
    stores = {"ram": FakeStore(0) if ram_pages else None, "disk": FakeStore(delay) if disk_pages else None}
    options |= stores | {"ram_pages": ram_pages, "disk_pages": disk_pages}
    options["policy"] = "fcfs" if priorities is None else "priority"
    loop = Loop(make_scheduler(num_pages, **options))
    scheduler = loop.scheduler
    coming = in_order(arrivals)
    if priorities is not None:
        for number, arrival in enumerate(coming):
            arrival.request.priority = priorities[number % len(priorities)]
    accepted, aborted = arrivals_served(loop, coming)
    for name, tier in ({} if scheduler.memory.tiers is None else scheduler.memory.tiers.stats()).items():
        event(f"read from {name}: {tier.hits > 0}")
    for request in accepted:
        if request.request_id not in aborted:
            check_tokens(request, GROUPS[groups])
    assert loop.num_used_blocks == 0
    scheduler.memory.check_invariants()
    if scheduler.memory.tiers is not None:
        assert not scheduler.memory.tiers.prefetch.requests, "something is read for no request"
