"""Requests of several outputs: what they share is computed and stored once, whatever happens to them."""

from __future__ import annotations

import pytest
from fake_device import Loop
from small_schedulers import group, make_request, make_scheduler
from unpaged import alone

from jpaged.scheduling import Sequence, allocation, planning
from jpaged.scheduling.allocation import num_common, plan_forks, tokens_to_fork


def outputs(request) -> list[list[int]]:
    return [seq.output_token_ids for seq in request.sequences]


def each_alone(request) -> list[list[int]]:
    return [alone(request, [group()], index=seq.index)[0] for seq in request.sequences]


def num_copies(steps) -> int:
    return sum(len(step.work_of("copies")) for step in steps)


# ---------------------------------------------------------------------- the prompt once


@pytest.mark.parametrize("budget", [8, 64])
def test_the_prompt_is_computed_once_and_all_first_tokens_are_drawn_from_its_last_row(budget):
    loop = Loop(make_scheduler(budget=budget))
    request = make_request(range(18), 5, width=4)
    steps = [step for step in loop.run(request) if step.chunks]
    assert sum(step.num_tokens for step in steps) == 18 + 4 * 4
    first = next(step for step in steps if step.samples)
    assert [sample.seq for sample in first.samples] == request.sequences
    assert {id(sample.chunk) for sample in first.samples} == {id(first.chunks[0])}
    assert outputs(request) == each_alone(request)
    assert len({tuple(tokens) for tokens in outputs(request)}) == 4


def test_a_shared_partial_tail_is_copied_for_all_but_its_last_owner():
    loop = Loop(make_scheduler())
    steps = loop.run(make_request(range(18), 5, width=4))
    copies = [list(step.work_of("copies")) for step in steps]
    assert [len(made) for made in copies[:3]] == [0, 3, 0]
    assert len({copy.src for copy in copies[1]}) == 1
    assert num_copies(steps) == 3


def test_outputs_that_are_forked_are_not_compared_with_each_other_at_every_token(monkeypatch):
    """A step of 256 outputs would compare 65,536 pairs."""
    asked = []

    def counted(sequences, seq):
        asked.append(seq)
        return allocation.children_due(sequences, seq)

    monkeypatch.setattr(planning, "children_due", counted)
    loop = Loop(make_scheduler())
    loop.run(make_request(range(18), 5, width=4))
    assert len(asked) == 1, "the first output, whose prompt the others share"


def test_a_full_tail_is_never_copied():
    loop = Loop(make_scheduler())
    assert num_copies(loop.run(make_request(range(16), 9, width=4))) == 0


def test_one_output_copies_nothing():
    loop = Loop(make_scheduler())
    assert num_copies(loop.run(make_request(range(18), 9))) == 0


def test_prompt_blocks_are_held_once():
    loop = Loop(make_scheduler())
    request = make_request(range(18), 5, width=4)
    loop.scheduler.add(request)
    loop.step()
    assert loop.num_used_blocks == 5
    loop.step()
    report = loop.scheduler.memory.report()
    assert loop.num_used_blocks == 4 + 4
    assert (report.blocks_saved, report.saving) == (4 * 5 - 8, 12 / 20)


def test_a_hit_in_the_prefix_cache_is_shared_by_all_outputs():
    loop = Loop(make_scheduler(prefix_caching=True))
    loop.run(make_request(range(18), 1))
    request = make_request(range(18), 5, width=3)
    steps = loop.run(request)
    assert request.num_cached_tokens == 16
    assert [chunk.length for chunk in steps[0].chunks] == [2]
    assert num_copies(steps) == 2
    assert outputs(request) == each_alone(request)


def test_a_request_takes_a_slot_for_each_output_from_the_beginning():
    loop = Loop(make_scheduler(max_num_seqs=4, budget=4))
    wide, late = make_request(range(11), 3, width=3), make_request(range(3), 3, width=2)
    loop.scheduler.add(wide)
    loop.scheduler.add(late)
    loop.step()
    assert len(loop.scheduler.allocation.free_rows) == 1
    loop.run()
    assert loop.finished == [wide, late]


def test_outputs_end_each_on_its_own_and_the_request_with_the_last():
    loop = Loop(make_scheduler())
    request = make_request(range(7), 20, width=4, eos=[1, 2, 3])
    loop.run(request)
    assert outputs(request) == each_alone(request)
    lengths = {len(tokens) for tokens in outputs(request)}
    assert len(lengths) > 1
    assert loop.finished == [request] and loop.num_used_blocks == 0


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 4])
def test_abort_before_and_after_the_fork_frees_everything(steps_before):
    loop = Loop(make_scheduler(budget=8, max_num_seqs=4))
    request = make_request(range(20), 9, width=4)
    loop.scheduler.add(request)
    for _ in range(steps_before):
        loop.step()
    loop.scheduler.abort(request)
    assert loop.num_used_blocks == 0
    assert sorted(loop.scheduler.allocation.free_rows) == [0, 1, 2, 3]
    loop.run()
    assert loop.finished == []


# ---------------------------------------------------------------------- refusals and growth


def test_a_request_is_refused_when_its_outputs_together_could_never_fit():
    scheduler = make_scheduler(num_blocks=10)
    scheduler.add(make_request(8, 8, width=4))  # 2 shared blocks and 2 of each
    with pytest.raises(ValueError, match="grow to 17 tokens in each of 4 sequences can never fit"):
        scheduler.add(make_request(8, 9, width=4))


def test_a_request_that_just_fits_runs_without_being_preempted():
    loop = Loop(make_scheduler(num_blocks=10))
    request = make_request(8, 8, width=4)
    loop.run(request)
    assert request.num_preemptions == 0
    assert outputs(request) == each_alone(request)


# ---------------------------------------------------------------------- preemption by recomputation


def preempted_pair(**options):
    """A request of three outputs that a older one pushes out after they diverged, and the steps."""
    loop = Loop(make_scheduler(num_blocks=16, max_num_seqs=4, budget=8, **options))
    older, wide = make_request(range(6), 30), make_request(range(10, 20), 14, width=3)
    steps = loop.run(older, wide)
    assert wide.num_preemptions > 0 and older.num_preemptions == 0
    assert outputs(wide) == each_alone(wide)
    assert loop.num_used_blocks == 0
    return loop, wide, steps


def test_a_preempted_request_recomputes_its_prompt_once_and_each_output_its_own_tail():
    _, wide, steps = preempted_pair()
    at = max(i for i, step in enumerate(steps) if wide in step.preempted)
    held = [chunk for step in steps[at:] for chunk in step.chunks if chunk.seq in wide.sequences]
    prompt = [chunk for chunk in held if chunk.start < wide.sequences[0].num_prompt]
    assert sum(chunk.length for chunk in prompt) == 10
    assert {chunk.seq for chunk in prompt} == {wide.sequences[0]}


def test_preemption_with_a_prefix_cache_gives_the_same_outputs():
    preempted_pair(prefix_caching=True)


def sequences(*outputs: list[int]) -> list[Sequence]:
    return [Sequence(i, i, [7, 7, *tokens], 2) for i, tokens in enumerate(outputs)]


def test_sequences_are_forked_along_the_tree_they_form():
    live = sequences([1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 2, 4], [5, 8])
    plan_forks(live)
    assert [(live.index(s.parent) if s.parent else None, s.fork_at) for s in live] == [
        (None, 0),
        (0, 4),
        (0, 2),
        (1, 5),
        (2, 3),
    ]
    assert tokens_to_fork(live, live[0]) == 2
    live[0].num_computed = 2
    assert tokens_to_fork(live, live[0]) == 2
    live[0].num_computed = 4
    assert tokens_to_fork(live, live[0]) == 1, "its last token: nobody else is forked from it"


def test_new_outputs_are_each_compared_with_one_other_and_never_by_their_prompt(monkeypatch):
    compared = []

    def counted(a, b) -> int:
        compared.append((a, b))
        return num_common(a, b)

    monkeypatch.setattr(allocation, "num_common", counted)
    live = make_request(50, width=40).sequences
    plan_forks(live)
    assert {(seq.parent, seq.fork_at) for seq in live[1:]} == {(live[0], 50)}
    assert compared == [([], [])] * 39


@pytest.mark.parametrize(("a", "b", "want"), [([], [], 0), ([1], [1], 1), ([1, 2], [1], 1), ([1], [2], 0)])
def test_outputs_have_in_common_what_comes_before_they_differ(a, b, want):
    assert num_common(a, b) == num_common(b, a) == want
