"""Who is let in: shared blocks count once, and what running prompts have yet to take is theirs already."""

from __future__ import annotations

import pytest
from fake_device import Loop
from fake_store import FakeStore
from small_schedulers import group, make_request, make_scheduler
from unpaged import alone

from jpaged.memory import PinnedSequences
from jpaged.scheduling import tier_prefetch

STATES = [group("full"), group("state", interval=8)]

PREFIX = list(range(160))
"""40 blocks of 4 tokens."""


def pinned_loop(num_blocks: int, **options) -> Loop:
    """An engine that holds the 40 blocks of PREFIX for good, and nothing else."""
    loop = Loop(make_scheduler(num_blocks, prefix_caching=True, budget=256, **options))
    loop.run(make_request([*PREFIX, 0], 1))
    memory = loop.scheduler.memory
    assert PinnedSequences(memory, 1).pin(-1, PREFIX)
    return loop


def most_running(loop: Loop, requests) -> int:
    for request in requests:
        loop.scheduler.add(request)
    most = 0
    while loop.scheduler.has_work or loop.in_flight is not None:
        loop.step()
        most = max(most, len(loop.scheduler.running))
    return most


@pytest.mark.parametrize(("watermark", "most"), [(0.0, 56), (0.05, 52)])  # 5 % of 96 blocks are 4
def test_with_a_pinned_prefix_as_many_run_as_have_a_block_of_their_own(watermark, most):
    loop = pinned_loop(96, max_num_seqs=64, watermark=watermark)
    requests = [make_request([*PREFIX, i], 2) for i in range(60)]
    assert most_running(loop, requests) == most
    assert loop.scheduler.num_preemptions == 0
    assert {request.num_cached_tokens for request in requests} == {160}
    assert requests[7].sequences[0].output_token_ids == alone(requests[7], [group()])[0]


def test_requests_that_share_what_another_computed_are_let_in_by_their_own_blocks():
    loop = Loop(make_scheduler(50, prefix_caching=True, budget=256, max_num_seqs=16))
    first = make_request([*PREFIX, 99], 12)
    loop.scheduler.add(first)
    for _ in range(6):
        loop.step()
    assert most_running(loop, [make_request([*PREFIX, i], 3) for i in range(5)]) == 6


def test_a_request_leaves_less_rather_than_wait_for_room_that_only_later_ones_need():
    groups = [group("full"), group("state", interval=8)]
    loop = Loop(make_scheduler(30, groups=groups, prefix_caching=True, budget=128))
    requests = [make_request([*range(100 * n, 100 * n + 44)], 4) for n in range(2)]
    for request in requests:
        loop.scheduler.add(request)
    loop.step()
    assert len(loop.scheduler.running) == 2, "both begin in one step"
    most_running(loop, [])
    assert loop.scheduler.num_preemptions == 0
    assert [each.sequences[0].output_token_ids for each in requests] == [alone(each, groups)[0] for each in requests]
    assert loop.scheduler.memory.cached_prefix([*range(100, 140), 7]) == 40, "the last state before the end is left"


@pytest.mark.parametrize("pages", [26, 31, 32])  # the two run one after the other, or the second leaves less
@pytest.mark.parametrize("kept", [20, 44])
def test_a_request_that_leaves_less_leaves_the_prefix_that_it_is_to_keep(pages, kept):
    loop = Loop(make_scheduler(pages, groups=STATES, prefix_caching=True, budget=128))
    loop.run(make_request([*range(100, 144)], 8), make_request([*range(44)], 1, kept_tokens=kept))
    assert loop.scheduler.memory.cached_prefix([*range(kept), 999]) == kept


@pytest.mark.parametrize("rows", [1, 2])
def test_a_request_that_lacks_no_blocks_leaves_all_that_it_can(rows):
    scheduler = make_scheduler(
        400, groups=STATES, prefix_caching=True, budget=128, max_num_seqs=rows, policy="priority"
    )
    loop = Loop(scheduler)
    loop.scheduler.add(make_request([*range(100, 144)], 20, priority=5))
    loop.step()
    loop.run(make_request([*range(44)], 4, priority=0))
    assert scheduler.num_preemptions == 2 - rows
    assert [n for n in range(4, 45, 4) if scheduler.memory.cached_prefix([*range(n), 999]) == n] == [
        *range(8, 41, 8),
        44,
    ]


@pytest.mark.parametrize("pages", [32, 33])
def test_a_request_still_leaves_less_once_it_has_what_a_tier_read(pages, monkeypatch):
    monkeypatch.setattr(tier_prefetch, "LONGEST_STOP", 0.0)
    scheduler = make_scheduler(pages, groups=STATES, prefix_caching=True, budget=128, ram=FakeStore(0))
    loop, prompt = Loop(scheduler), [*range(44)]
    loop.run(make_request(prompt, 4))
    for n in range(1, 5):
        loop.run(make_request([*range(1000 * n, 1000 * n + 44)], 4))
    requests = [make_request([*range(100, 144)], 4), make_request([*prompt[:20], *range(300, 324)], 4)]
    assert most_running(loop, requests) == 2
    assert scheduler.num_preemptions == 0 and requests[1].num_cached_tokens == 16
    said = requests[1].prompt_token_ids
    left = [n for n in range(4, 45, 4) if scheduler.memory.cached_prefix([*said[:n], 999]) == n]
    assert 32 not in left and 40 in left, "the states inside its prompt are not left"


@pytest.mark.parametrize("pages, layer_bytes, prompt, output", [(11, 8, 36, 4), (4, 40, 26, 13)])
def test_a_request_that_leaves_nothing_has_what_a_tier_read(pages, layer_bytes, prompt, output, monkeypatch):
    monkeypatch.setattr(tier_prefetch, "LONGEST_STOP", 0.0)
    groups = [group("full", layer_bytes=8), group("state", interval=8, layer_bytes=layer_bytes)]
    loop = Loop(make_scheduler(pages, groups=groups, prefix_caching=True, budget=40, ram=FakeStore(0)))
    loop.run(make_request([*range(23), 999], 1))
    for n in range(1, 4):
        loop.run(make_request([*range(1000 * n, 1000 * n + prompt - 10)], 1))
    request = make_request(range(prompt), output)
    loop.run(request)
    assert request.num_cached_tokens == request.tier_tokens["ram"] == 16
    assert request.sequences[0].output_token_ids == alone(request, groups)[0]


def test_blocks_of_a_pinned_prefix_count_once_at_refusal():
    loop = pinned_loop(50)
    with pytest.raises(ValueError, match="can never fit the pool of 50 large pages"):
        loop.scheduler.add(make_request([*PREFIX, 1], 40))  # 11 blocks beside the prefix
    with pytest.raises(ValueError, match="can never fit"):
        loop.scheduler.add(make_request([7, *PREFIX[1:], 1], 3))  # begins otherwise
    request = make_request([*PREFIX, 1], 39)
    loop.run(request)
    assert request.sequences[0].output_token_ids == alone(request, [group()])[0]


def test_a_prefix_that_is_cached_but_not_pinned_does_not_count_at_refusal():
    loop = Loop(make_scheduler(45, prefix_caching=True, budget=256))
    loop.run(make_request([*PREFIX, 0], 1))
    with pytest.raises(ValueError, match="can never fit"):
        loop.scheduler.add(make_request([*PREFIX, 0], 20, width=2))


@pytest.mark.parametrize("output", [4, 5])
def test_a_pin_leaves_room_if_every_request_can_grow_after_it(output):
    loop = Loop(make_scheduler(50, prefix_caching=True, budget=256))
    loop.run(make_request([*PREFIX, 0], 1))
    loop.scheduler.add(make_request(36, output))  # 10 blocks are left of 50
    loop.scheduler.add(make_request([*PREFIX, 1], 39))  # more, and 40 of them pinned
    assert loop.scheduler.admission.leaves_room()
    assert PinnedSequences(loop.scheduler.memory, 1).pin(-1, PREFIX)
    assert loop.scheduler.admission.leaves_room() == (output <= 4)


def test_a_request_that_asks_for_its_prompts_log_probabilities_computes_a_pinned_prefix_itself():
    loop = pinned_loop(50)
    with pytest.raises(ValueError, match="can never fit"):
        loop.scheduler.add(make_request([*PREFIX, 1], 3, prompt_logprobs=1))


@pytest.mark.parametrize("threshold", [0, 16])
def test_prompts_are_let_in_only_beside_what_running_ones_have_yet_to_take(threshold):
    scheduler = make_scheduler(45, budget=64, max_num_seqs=8, long_prefill_token_threshold=threshold)
    loop = Loop(scheduler)
    requests = [make_request(160, 2) for _ in range(8)]  # 40 blocks, and one for what follows
    steps = loop.run(*requests)
    assert scheduler.num_preemptions == 0
    assert sum(step.num_tokens for step in steps) == 8 * (160 + 1)
    assert loop.finished == requests


def test_prompts_that_fit_together_are_computed_together():
    scheduler = make_scheduler(90, budget=64, max_num_seqs=8, long_prefill_token_threshold=16)
    loop = Loop(scheduler)
    steps = loop.run(*[make_request(160, 2) for _ in range(4)])
    assert max(len(step.chunks) for step in steps) == 2
    assert scheduler.num_preemptions == 0


def test_outputs_that_will_be_forked_are_counted_while_the_prompt_is_computed():
    scheduler = make_scheduler(24, budget=32, max_num_seqs=16, long_prefill_token_threshold=8)
    loop = Loop(scheduler)
    loop.run(make_request(34, 2, width=6), make_request(34, 2, width=6))  # 8 full blocks and 6 tails each
    assert scheduler.num_preemptions == 0


def test_a_swapped_prompt_comes_back_only_where_the_rest_of_it_fits():
    scheduler = make_scheduler(
        24, budget=40, max_num_seqs=4, long_prefill_token_threshold=8, preemption_mode="swap", swap_blocks=24
    )
    loop = Loop(scheduler)
    older, newer = make_request(20, 60), make_request(48, 4)
    steps = loop.run(older, newer)
    assert newer.num_preemptions <= 1
    assert sum(step.num_tokens for step in steps) == 20 + 59 + 48 + 3


@pytest.mark.parametrize("prompt, output", [(1, 3), (5, 10), (20, 20), (31, 2), (70, 10), (100, 30)])
def test_prefix_caching_refuses_no_request_for_what_it_could_leave(prompt, output):
    groups = [group("full", layer_bytes=8), group("state", interval=32, layer_bytes=80)]
    request = make_request(range(prompt), output)

    def pages(**options) -> int:
        fits = (n for n in range(1, 100) if accepts(make_scheduler(n, groups=groups, **options), request))
        return next(fits)

    least = pages(prefix_caching=True)
    assert least == pages(prefix_caching=False)
    Loop(make_scheduler(least, groups=groups, prefix_caching=True)).run(request, most_steps=4 * (prompt + output))
    assert request.sequences[0].output_token_ids == alone(request, groups)[0]


def accepts(scheduler, request) -> bool:
    return scheduler.admission.is_possible(request, scheduler.admission.lifetime(request))


@pytest.mark.parametrize("more, output", [(1, 3), (9, 20), (30, 2), (20, 40)])
@pytest.mark.parametrize("pinned", [8, 20, 40])
def test_a_hybrids_request_after_a_pinned_prefix_ends_in_every_pool_that_accepts_it(pinned, more, output):
    groups = [group("full", layer_bytes=8), group("state", interval=8, layer_bytes=40)]
    accepted = 0
    for pages in range(pinned // 4 + 10, 80):
        loop = Loop(make_scheduler(pages, groups=groups, prefix_caching=True, budget=64))
        head, request = make_request(range(pinned + 1), 1), make_request(range(pinned + more), output)
        head.kept_tokens = pinned
        loop.run(head)
        assert PinnedSequences(loop.scheduler.memory, 1).pin(-1, list(range(pinned)))
        if accepts(loop.scheduler, request):
            loop.run(request, most_steps=20 * (pinned + more + output))
            assert request.sequences[0].output_token_ids == alone(request, groups)[0]
            if (accepted := accepted + 1) == 3:
                return
    raise AssertionError("no pool accepts it")
