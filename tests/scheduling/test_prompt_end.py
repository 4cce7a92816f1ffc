"""Chunks around the end of a prompt whose tokens are to be chosen from."""

from __future__ import annotations

import pytest
from fake_device import Loop
from small_schedulers import group, make_request, make_scheduler
from unpaged import alone

from jpaged.scheduling import Sequence
from jpaged.scheduling.allocation import tokens_before_end


def chunks_of(loop: Loop, request) -> list[tuple[int, int]]:
    return [(c.start, c.length) for step in loop.run(request) for c in step.chunks if c.seq is request.sequences[0]]


@pytest.mark.parametrize(
    ("computed", "most", "taken"),
    [(0, 16, 16), (16, 16, 16), (30, 16, 16), (32, 16, 14), (40, 9, 6), (46, 3, 0), (46, 4, 4), (46, 9, 4), (50, 9, 9)],
)
def test_a_chunk_takes_all_that_is_left_of_a_prompt_or_leaves_its_tail(computed, most, taken):
    assert tokens_before_end(Sequence(0, 0, [1] * 60, 50, num_computed=computed), most, tail=4) == taken


def test_without_a_tail_chunks_end_anywhere():
    assert tokens_before_end(Sequence(0, 0, [1] * 60, 50, num_computed=40), 15, tail=0) == 15


def test_the_tail_of_a_prompt_is_one_chunk():
    loop = Loop(make_scheduler(budget=16, groups=[group(budget=64, tail=4)]))
    assert chunks_of(loop, make_request(50, 3)) == [(0, 16), (16, 16), (32, 14), (46, 4), (50, 1), (51, 1)]


def test_the_longest_tail_of_the_groups_counts_and_a_prompt_shorter_than_it_is_one_chunk():
    loop = Loop(make_scheduler(budget=16, groups=[group(budget=64, tail=2), group("high", budget=64, tail=6)]))
    requests = [make_request(13, 1), make_request(5, 1)]
    chunks = [(c.start, c.length) for step in loop.run(*requests) for c in step.chunks]
    assert chunks == [(0, 13), (0, 5)]


def test_after_a_preemption_a_chunk_ends_with_the_prompt_again():
    specs = [group("low", budget=8, tail=4), group("high", budget=4, tail=4)]
    loop = Loop(make_scheduler(14, groups=specs, max_num_seqs=2, budget=20))
    older, newer = make_request(14, 20), make_request(15, 20)
    steps = loop.run(older, newer)
    assert newer.num_preemptions > 0
    chunks = [(c.start, c.length) for step in steps for c in step.chunks if c.seq is newer.sequences[0]]
    assert chunks.count((0, 15)) == 1 + newer.num_preemptions, chunks
    for request in (older, newer):
        assert request.sequences[0].output_token_ids == alone(request, specs)[0]
