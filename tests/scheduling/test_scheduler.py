"""The order, the limits and the ends of requests, with made-up tokens that come back one step late."""

from __future__ import annotations

import pytest
from fake_device import Loop
from small_schedulers import group, make_request, make_scheduler
from unpaged import VOCAB, alone

from jpaged.scheduling import Request, Scheduler, Status


def constant(token: int):
    return lambda name: token


def ids(step) -> list[int]:
    return [chunk.seq.seq_id for chunk in step.chunks]


def seq_id(request) -> int:
    return request.sequences[0].seq_id


# ---------------------------------------------------------------------- order and limits


def test_requests_start_and_end_in_the_order_they_came():
    loop = Loop(make_scheduler(max_num_seqs=2))
    requests = [make_request(5, 3) for _ in range(6)]
    loop.run(*requests)
    assert loop.finished == requests
    starts = [request.first_scheduled_time for request in requests]
    assert starts == sorted(starts)


def test_a_waiting_request_is_never_overtaken_by_a_smaller_one():
    loop = Loop(make_scheduler(num_blocks=8, max_num_seqs=4))
    running, large, small = make_request(20, 4), make_request(20, 4), make_request(2, 1)
    for request in (running, large, small):
        loop.scheduler.add(request)
    assert ids(loop.step()) == [seq_id(running)]
    assert list(loop.scheduler.waiting) == [large, small]
    loop.run()
    assert loop.finished.index(large) < 3 and len(loop.finished) == 3
    assert large.first_scheduled_time < small.first_scheduled_time


def test_a_step_fills_the_token_budget_and_never_passes_it():
    loop = Loop(make_scheduler(budget=16, max_num_seqs=8))
    steps = loop.run(*[make_request(7, 2) for _ in range(6)])
    assert [chunk.length for chunk in steps[0].chunks] == [7, 7, 2]
    assert max(step.num_tokens for step in steps) == 16


def test_every_running_sequence_that_can_decodes_in_every_step():
    loop = Loop(make_scheduler(budget=12, max_num_seqs=4, num_blocks=200))
    decoding = [make_request(2, 60) for _ in range(3)]
    for request in decoding:
        loop.scheduler.add(request)
    loop.step()
    loop.scheduler.add(make_request(100, 2))
    for _ in range(14):
        step = loop.step()
        assert {seq_id(r) for r in decoding} <= set(ids(step)), "a decode waits for a long prompt"
        assert step.num_tokens <= 12


def test_an_older_prompt_in_chunks_does_not_starve_newer_decodes():
    loop = Loop(make_scheduler(budget=8, max_num_seqs=4, num_blocks=200))
    long, short = make_request(60, 2), make_request(3, 20)
    loop.scheduler.add(make_request(1, 1))
    loop.scheduler.add(long)
    loop.step()
    for column in (loop.scheduler.queues.running, loop.scheduler.queues.alone):
        column.append(column.pop(0))  # whatever the order of running
    loop.scheduler.add(short)
    steps = loop.run()
    first = next(i for i, step in enumerate(steps) if seq_id(short) in ids(step))
    assert all(seq_id(short) in ids(step) for step in steps[first : first + 20])


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once_at_its_end():
    loop = Loop(make_scheduler(budget=16, num_blocks=64))
    request = make_request(50, 1)
    steps = loop.run(request)
    chunks = [(c.start, c.length) for step in steps for c in step.chunks]
    assert chunks == [(0, 16), (16, 16), (32, 16), (48, 2)]
    assert [len(step.samples) for step in steps if step.chunks] == [0, 0, 0, 1]
    assert request.sequences[0].output_token_ids == alone(request, [group()])[0]


def test_max_num_seqs_sequences_run_at_once_and_no_more():
    loop = Loop(make_scheduler(max_num_seqs=3, num_blocks=64))
    steps = loop.run(*[make_request(2, 5) for _ in range(7)])
    assert max(len(step.chunks) for step in steps) == 3
    assert len(loop.finished) == 7


def test_rows_are_distinct_and_within_max_num_seqs():
    loop = Loop(make_scheduler(max_num_seqs=3))
    for request in [make_request(2, n) for n in (1, 5, 2, 4, 3)]:
        loop.scheduler.add(request)
    while loop.scheduler.has_work:
        rows = [chunk.seq.row for chunk in loop.step().chunks if chunk.seq.row >= 0]
        assert len(set(rows)) == len(rows) and set(rows) <= {0, 1, 2}


def test_a_budget_below_max_num_seqs_is_refused():
    memory = make_scheduler().memory
    with pytest.raises(ValueError, match="max_num_batched_tokens=7 is below max_num_seqs=8"):
        Scheduler(memory, max_num_seqs=8, max_num_batched_tokens=7)


# ---------------------------------------------------------------------- memory


def test_the_newest_request_is_preempted_first_and_comes_back_first():
    loop = Loop(make_scheduler(num_blocks=6, max_num_seqs=3))
    requests = [make_request(7, 9) for _ in range(3)]
    steps = loop.run(*requests)
    preempted = [request for step in steps for request in step.preempted]
    assert preempted and preempted[0] is requests[2]
    assert requests[0].num_preemptions == 0
    assert loop.finished == requests
    assert loop.scheduler.num_preemptions == len(preempted) == sum(r.num_preemptions for r in requests)


def test_a_preempted_request_recomputes_prompt_and_generated_as_one_prefill():
    loop = Loop(make_scheduler(num_blocks=6, max_num_seqs=2))
    older, newer = make_request(11, 12), make_request(7, 9)
    steps = loop.run(older, newer)
    at = next(i for i, step in enumerate(steps) if newer in step.preempted)
    assert newer.num_preemptions == 1
    seen = len(newer.prompt_token_ids) + sum(seq_id(newer) in ids(step) for step in steps[:at])
    again = next(c for step in steps[at:] for c in step.chunks if c.seq is newer.sequences[0])
    assert (again.start, again.length, again.source_row) == (0, seen, -1)
    assert seen > len(newer.prompt_token_ids)
    for request in (older, newer):
        assert request.sequences[0].output_token_ids == alone(request, [group()])[0]


def test_nothing_is_admitted_in_a_step_that_preempted():
    loop = Loop(make_scheduler(num_blocks=6, max_num_seqs=4))
    requests = [make_request(7, 9), make_request(7, 9), make_request(1, 1)]
    for request in requests:
        loop.scheduler.add(request)
    while loop.scheduler.has_work:
        waiting = len(loop.scheduler.waiting)
        step = loop.step()
        if step.preempted:
            assert len(loop.scheduler.waiting) == waiting + len(step.preempted)


def test_sequences_of_one_request_are_preempted_together():
    loop = Loop(make_scheduler(num_blocks=7, max_num_seqs=3))
    older, pair = make_request(7, 9), make_request(7, 4, width=2)
    steps = loop.run(older, pair)
    at = next(i for i, step in enumerate(steps) if pair in step.preempted)
    assert not {seq.seq_id for seq in pair.sequences} & set(ids(steps[at]))
    outputs = [seq.output_token_ids for seq in pair.sequences]
    assert outputs == [alone(pair, [group()], index=i)[0] for i in range(2)]
    assert loop.num_used_blocks == 0


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (lambda: make_request(20, 30), "20 prompt tokens that may grow to 50 tokens can never fit"),
        (lambda: make_request(2, 1, width=9), "n=9 is above max_num_seqs=8"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_and_the_queue_goes_on(request_, match):
    loop = Loop(make_scheduler(num_blocks=10))
    before, after = make_request(4, 3), make_request(4, 3)
    loop.scheduler.add(before)
    with pytest.raises(ValueError, match=match):
        loop.scheduler.add(request_())
    loop.run(after)
    assert loop.finished == [before, after]
    assert loop.num_used_blocks == 0


def test_blocks_are_taken_on_demand_and_waste_less_than_one_a_sequence():
    loop = Loop(make_scheduler(num_blocks=64, budget=16, max_num_seqs=4))
    requests = [make_request(n, 20) for n in (3, 9, 17)]
    for request in requests:
        loop.scheduler.add(request)
    while loop.scheduler.has_work:
        loop.step()
        needed = [-(-r.sequences[0].num_computed // 4) for r in loop.scheduler.running]
        assert loop.num_used_blocks == sum(needed)


def test_blocks_behind_a_sliding_window_are_given_back():
    loop = Loop(make_scheduler(num_blocks=4, groups=[group("window", window=6)], budget=4, max_num_seqs=1))
    request = make_request(40, 20)
    loop.run(request)
    assert request.num_preemptions == 0
    assert request.sequences[0].output_token_ids == alone(request, [group("window", window=6)])[0]


def test_the_watermark_is_kept_free_at_admission_but_not_from_running_sequences():
    loop = Loop(make_scheduler(num_blocks=10, watermark=0.3, max_num_seqs=4))
    first, second = make_request(16, 12), make_request(16, 4)
    loop.scheduler.add(first)
    loop.scheduler.add(second)
    loop.step()
    assert second.status is Status.WAITING, "4 + 4 blocks leave 2 of the 3 to be kept free"
    steps = loop.run()
    assert not any(step.preempted for step in steps)
    assert loop.finished == [first, second]


def test_scattered_hits_never_make_a_lone_request_preempt_itself_for_ever():
    groups = [
        group("full", block_size=2, layer_bytes=1),
        group("window", window=3, block_size=2, layer_bytes=4),
    ]
    loop = Loop(make_scheduler(num_blocks=6, groups=groups, budget=4, max_num_seqs=4, prefix_caching=True))
    prompt = list(range(12))
    mixed = [make_request(prompt[:n], 3) for n in (4, 8, 6, 12, 10)]
    loop.run(*mixed, most_steps=2_000)
    for request in mixed:
        assert request.sequences[0].output_token_ids == alone(request, groups)[0]


# ---------------------------------------------------------------------- how a request ends


def ends(request, model) -> tuple[list[int], str | None, object]:
    loop = Loop(make_scheduler(), model)
    loop.run(request)
    seq = request.sequences[0]
    assert loop.finished == [request] and request.status is Status.FINISHED
    assert loop.num_used_blocks == 0
    return seq.output_token_ids, seq.finish_reason, seq.stop_reason


def counting():
    """0, 1, 2, ... by the call: the step's only sample."""
    numbers = iter(range(1000))
    return lambda name: next(numbers)


def test_end_of_sequence_stops_without_a_stop_reason():
    assert ends(make_request(3, 9, eos=[2]), counting()) == ([0, 1, 2], "stop", None)


def test_a_stop_token_is_kept_and_named():
    assert ends(make_request(3, 9, eos=[7], stop_token_ids=[2]), counting()) == ([0, 1, 2], "stop", 2)


def test_max_tokens_ends_by_length():
    assert ends(make_request(3, 4), counting()) == ([0, 1, 2, 3], "length", None)


def test_one_token_takes_one_step():
    loop = Loop(make_scheduler())
    steps = loop.run(make_request(3, 1))
    assert [step.num_tokens for step in steps if step.chunks] == [3]


def test_a_stop_token_at_the_length_limit_is_a_stop():
    assert ends(make_request(3, 3, eos=[2]), counting()) == ([0, 1, 2], "stop", None)


def test_ignore_eos_goes_on_but_stop_tokens_still_stop():
    request = make_request(3, 9, eos=[1], ignore_eos=True, stop_token_ids=[4])
    assert ends(request, counting()) == ([0, 1, 2, 3, 4], "stop", 4)


def test_no_stop_before_min_tokens():
    assert ends(make_request(3, 9, eos=[5], min_tokens=4), constant(5)) == ([5] * 4, "stop", None)


def test_a_stop_found_one_step_late_drops_the_extra_token():
    loop = Loop(make_scheduler(), constant(5))
    request = make_request(3, 9, eos=[5])
    steps = loop.run(request)
    assert sum(len(step.samples) for step in steps) == 2, "the step after the stop was already on its way"
    assert request.sequences[0].output_token_ids == [5]
    assert request.sequences[0].cumulative_logprob == -0.5


def test_a_dropped_token_does_not_reach_the_next_owner_of_its_block():
    loop = Loop(make_scheduler(num_blocks=2, max_num_seqs=2))
    first, second = make_request(4, 4), make_request([2, 3, 4, 5], 4)
    first.stop_ids = frozenset(range(VOCAB))
    loop.run(first, second)
    assert len(first.sequences[0].output_token_ids) == 1
    assert second.sequences[0].output_token_ids == alone(second, [group()])[0]


def test_a_request_whose_stop_arrives_after_it_was_preempted_leaves_the_queue():
    def pair(min_tokens):
        return make_request(11, 12), make_request(7, 9, eos=[5], min_tokens=min_tokens)

    older, newer = pair(min_tokens=9)
    loop = Loop(make_scheduler(num_blocks=6, max_num_seqs=2), constant(5))
    loop.scheduler.add(older)
    loop.scheduler.add(newer)
    pending_at = 0
    while not pending_at:
        before = newer.sequences[0].num_output
        pending_at = before if loop.step().preempted else 0
    # The same again, but the token that was on its way at the preemption is the last.
    older, newer = pair(min_tokens=pending_at)
    loop = Loop(make_scheduler(num_blocks=6, max_num_seqs=2), constant(5))
    loop.run(older, newer)
    assert newer.num_preemptions == 1
    assert newer.sequences[0].output_token_ids == [5] * pending_at
    assert newer.sequences[0].finish_reason == "stop"
    assert loop.finished == [newer, older] and loop.num_used_blocks == 0


def test_the_first_token_time_and_the_log_probabilities_are_kept():
    loop = Loop(make_scheduler())
    request = make_request(3, 4)
    loop.run(request)
    assert request.sequences[0].cumulative_logprob == -2.0
    times = request.metrics()
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time


# ---------------------------------------------------------------------- abort


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_abort_frees_everything_at_once_and_harms_nobody(steps_before):
    loop = Loop(make_scheduler(budget=8, max_num_seqs=2))
    other, request = make_request([4, 5, 6], 12), make_request(12, 30)
    loop.scheduler.add(other)
    loop.scheduler.add(request)
    for _ in range(steps_before):
        loop.step()
    loop.scheduler.abort(request)
    assert request.status is Status.FINISHED and request.sequences[0].finish_reason == "abort"
    held = sum(-(-r.sequences[0].num_computed // 4) for r in loop.scheduler.running)
    assert loop.num_used_blocks == held
    loop.scheduler.memory.check_invariants()
    loop.run()
    assert loop.finished == [other]
    assert other.sequences[0].output_token_ids == alone(other, [group()])[0]


def test_abort_of_a_finished_request_does_nothing():
    loop = Loop(make_scheduler())
    request = make_request(3, 2)
    loop.run(request)
    loop.scheduler.abort(request)
    assert request.sequences[0].finish_reason == "length"


# ---------------------------------------------------------------------- prefix cache


def test_a_prompt_seen_before_is_taken_from_the_cache_all_but_its_last_block():
    loop = Loop(make_scheduler(prefix_caching=True, budget=64))
    first, again = make_request(range(10), 3), make_request(range(10), 3)
    loop.run(first)
    steps = loop.run(again)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 8)
    assert (steps[0].chunks[0].start, steps[0].chunks[0].length) == (8, 2)
    assert again.sequences[0].output_token_ids == first.sequences[0].output_token_ids


def test_without_prefix_caching_nothing_is_reused():
    loop = Loop(make_scheduler(prefix_caching=False))
    loop.run(make_request(range(10), 3))
    again = make_request(range(10), 3)
    loop.run(again)
    assert again.num_cached_tokens == 0


def test_a_request_that_needs_the_host_waits_for_its_token_while_others_run_ahead(monkeypatch):
    scheduler = make_scheduler()
    waits, ahead = make_request(3, 5), make_request(3, 5)
    monkeypatch.setattr(Request, "needs_host", property(lambda self: self is waits))
    steps = Loop(scheduler).run(waits, ahead)
    runs = {request: [any(s.request is request for s in step.samples) for step in steps] for request in (waits, ahead)}
    assert runs[ahead][:5] == [True] * 5
    assert runs[waits][:9] == [True, False] * 4 + [True]
    assert all(chunk.source_row < 0 for step in steps for chunk in step.chunks if chunk.seq is waits.sequences[0])
    assert waits.sequences[0].token_ids == ahead.sequences[0].token_ids
