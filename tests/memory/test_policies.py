"""What each kind of layer still reads, and which prefixes it can serve."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.memory import (
    ChunkedLocalAttention,
    CrossAttention,
    FullAttention,
    Policy,
    SlidingWindow,
    TokenBudget,
)
from jpaged.memory.policies import UNBOUNDED

budgets = st.builds(TokenBudget, st.integers(0, 3), st.integers(1, 4), st.integers(0, 6))
policies = st.one_of(
    st.just(FullAttention()),
    st.builds(SlidingWindow, st.integers(1, 12)),
    st.builds(ChunkedLocalAttention, st.integers(1, 12)),
    budgets,
)
sizes = st.integers(1, 5)


def hits(text: str) -> list[bool]:
    return [c == "T" for c in text]


def active(policy: Policy, length: int, size: int) -> set[int]:
    return {block for run in policy.active_blocks(length, size) for block in run}


@pytest.mark.parametrize(("text", "blocks"), [("TTFTFFTTFTTT", 12), ("TTFTFFTTFFF", 8), ("TTF", 2), ("F", 0)])
def test_window_4_of_blocks_of_2_serves_the_known_prefixes(text, blocks):
    assert max(SlidingWindow(4).possible_prefix(hits(text), 2)) == blocks


def test_full_attention_serves_a_prefix_up_to_the_first_miss():
    assert list(FullAttention().possible_prefix(hits("TTFT"), 2)) == [0, 1, 2]


def test_a_window_frees_block_0_after_5_computed_tokens():
    window = SlidingWindow(4)
    assert active(window, 4, 2) == {0, 1}
    assert active(window, 5, 2) == {1, 2}


def read_positions(policy: Policy, position: int) -> range:
    """Return where the tokens are, before it, that the token at `position` reads."""
    match policy:
        case SlidingWindow(window):
            return range(max(0, position - window + 1), position)
        case ChunkedLocalAttention(chunk):
            return range(position // chunk * chunk, position)
        case TokenBudget():
            return range(min(position, policy.budget))
    return range(position)


def test_a_chunk_is_read_until_the_next_begins():
    chunked = ChunkedLocalAttention(4)
    assert [sorted(active(chunked, length, 2)) for length in (3, 4, 5, 7)] == [[0, 1], [], [2], [2, 3]]
    assert list(chunked.possible_prefix(hits("FTTTFF"), 2)) == [0, 2, 3, 4, 6]


def test_a_chunk_that_ends_within_a_block_keeps_that_block():
    assert active(ChunkedLocalAttention(3), 3, 2) == {1}
    assert active(ChunkedLocalAttention(3), 4, 2) == {1}
    assert active(ChunkedLocalAttention(3), 6, 2) == set()


def test_cross_attention_holds_all_encoder_blocks_from_the_first_token_to_the_last():
    images = CrossAttention().for_request(5)
    assert [images.num_blocks(length, 2) for length in (0, 1, 100)] == [0, 3, 3]
    assert active(images, 1, 2) == active(images, 99, 2) == {0, 1, 2}
    assert images.capacity(3, 2, 1) == UNBOUNDED and images.capacity(2, 2, 1) == 0
    assert list(images.written_blocks(0, 7, 2)) == [0, 1, 2] and not images.written_blocks(7, 9, 2)
    assert [images.filled_tokens(i, 1, 2) for i in range(3)] == [2, 2, 1]


def test_cross_attention_serves_any_length_if_all_blocks_are_hits_else_none():
    images = CrossAttention().for_request(6)
    assert images.alignment(2) == 1
    assert 12345 in images.possible_prefix(hits("TTT"), 2)
    assert list(images.possible_prefix(hits("TTF"), 2)) == [0]
    assert 7 in CrossAttention().for_request(0).possible_prefix([], 2), "without images nothing is needed"


def test_a_token_budget_never_holds_more_blocks_than_it_has_tokens_for():
    budget = TokenBudget(sink=1, recent=3, top=4)
    assert [budget.num_blocks(length, 3) for length in (0, 3, 7, 8, 9, 1000)] == [0, 1, 3, 3, 3, 3]
    assert list(budget.possible_prefix(hits("TTT"), 3)) == [0, 1, 2], "the third block is overwritten beyond 8 tokens"


def test_a_token_budget_writes_anywhere_once_it_is_full():
    budget = TokenBudget(sink=1, recent=3, top=4)
    assert list(budget.written_blocks(6, 8, 3)) == [2]
    assert list(budget.written_blocks(7, 9, 3)) == [0, 1, 2]
    assert budget.full_blocks(8, 8, 3) == 2 and budget.full_blocks(8, 9, 3) == 0
    assert budget.capacity(3, 3, 8) == 8, "the first step beyond has to be allocated"
    assert budget.capacity(3, 3, 9) == UNBOUNDED


@given(policies, st.integers(0, 60), sizes)
def test_active_blocks_are_what_the_next_token_reads_and_the_partial_tail(policy, length, size):
    reads = {p // size for p in read_positions(policy, length)}
    tail = {length // size} if length % size and not isinstance(policy, TokenBudget) else set()
    assert active(policy, length, size) == reads | tail


@given(policies, st.integers(0, 40), st.integers(1, 20), sizes)
def test_what_a_step_writes_was_active_or_is_new(policy, length, tokens, size):
    old = range(policy.num_blocks(length, size))
    assert set(policy.written_blocks(length, length + tokens, size)) & set(old) <= active(policy, length, size)


@given(policies, st.lists(st.booleans(), max_size=20), sizes)
def test_a_prefix_is_possible_exactly_when_its_active_blocks_are_hits(policy, is_hit, size):
    most = len(is_hit)
    if isinstance(policy, TokenBudget):
        most = min(most, policy.budget // size)
    expected = [n for n in range(most + 1) if all(is_hit[i] for i in active(policy, n * size, size))]
    assert list(policy.possible_prefix(is_hit, size)) == expected


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
    assert policy.capacity(blocks, size, length) >= length
    assert blocks == 0 or policy.capacity(blocks - 1, size, (blocks - 1) * size) < length


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(0), "window=0"),
        (lambda: ChunkedLocalAttention(0), "chunk=0"),
        (lambda: CrossAttention(-1), "encoder_tokens=-1"),
        (lambda: TokenBudget(-1, 1, 1), "sink=-1"),
        (lambda: TokenBudget(0, 0, 9), "recent=0"),
        (lambda: TokenBudget(0, 1, -2), "top=-2"),
    ],
)
def test_sizes_that_make_no_sense_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()
