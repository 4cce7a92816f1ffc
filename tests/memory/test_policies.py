"""What each kind of layer still reads, and which prefixes it can serve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.memory import FullAttention, Policy, SlidingWindow

policies = st.one_of(st.just(FullAttention()), st.builds(SlidingWindow, st.integers(1, 12)))
sizes = st.integers(1, 5)


def hits(text: str) -> list[bool]:
    return [c == "T" for c in text]


def active(policy: Policy, length: int, size: int) -> set[int]:
    return {block for run in policy.active_blocks(length, size) for block in run}


@pytest.mark.parametrize(("text", "blocks"), [("TTFTFFTTFTTT", 12), ("TTFTFFTTFFF", 8), ("TTF", 2), ("F", 0)])
def test_window_4_of_blocks_of_2_serves_the_known_prefixes(text, blocks):
    assert max(SlidingWindow(4).possible_prefix(hits(text), 2)) == blocks


def test_full_attention_serves_a_prefix_up_to_the_first_miss():
    assert set(FullAttention().possible_prefix(hits("TTFT"), 2)) == {0, 1, 2}


def test_a_window_frees_block_0_after_5_computed_tokens():
    window = SlidingWindow(4)
    assert active(window, 4, 2) == {0, 1}
    assert active(window, 5, 2) == {1, 2}


@given(policies, st.integers(0, 60), sizes)
def test_active_blocks_are_what_the_next_token_reads_and_the_partial_tail(policy, length, size):
    window = policy.window if isinstance(policy, SlidingWindow) else length + 1
    reads = {p // size for p in range(max(0, length - window + 1), length)}
    tail = {length // size} if length % size else set()
    assert active(policy, length, size) == reads | tail


@given(policies, st.lists(st.booleans(), max_size=20), sizes)
def test_a_prefix_is_possible_exactly_when_its_active_blocks_are_hits(policy, is_hit, size):
    expected = {n for n in range(len(is_hit) + 1) if all(is_hit[i] for i in active(policy, n * size, size))}
    assert set(policy.possible_prefix(is_hit, size)) == expected


@given(policies, st.integers(0, 60), sizes)
def test_inactive_blocks_stay_inactive(policy, length, size):
    gone = set(range(-(-length // size))) - active(policy, length, size)
    assert not gone & active(policy, length + 1, size)


@given(policies, st.lists(st.integers(1, 9), max_size=12), sizes)
def test_peak_blocks_bounds_what_a_chunked_prefill_holds(policy, chunks, size):
    length = sum(chunks)
    bound = policy.peak_blocks(length, max(chunks, default=1), size)
    computed = 0
    for chunk in chunks:
        held = active(policy, computed, size) | set(range(computed // size, policy.num_blocks(computed + chunk, size)))
        assert len(held) <= bound <= policy.num_blocks(length, size)
        computed += chunk


@given(policies, st.integers(0, 60), sizes)
def test_capacity_is_the_inverse_of_num_blocks(policy, length, size):
    blocks = policy.num_blocks(length, size)
    assert policy.capacity(blocks, size) >= length
    assert blocks == 0 or policy.capacity(blocks - 1, size) < length


def test_a_window_has_at_least_one_token():
    with pytest.raises(ValueError, match="window=0"):
        SlidingWindow(0)
