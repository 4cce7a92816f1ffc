"""The longest sequence a pool takes, and how many tokens it holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler

from jpaged.engine.sizes import longest_sequence, pool_tokens


def memory(num_blocks, **options):
    return make_scheduler(num_blocks=num_blocks, **options).memory


def test_a_pool_of_full_attention_holds_its_blocks():
    assert longest_sequence(memory(10), 100) == 40
    assert longest_sequence(memory(10), 30) == 30
    assert pool_tokens(memory(10), 40) == 40
    assert pool_tokens(memory(10), 20) == 40


def test_the_watermark_is_not_counted_on():
    assert longest_sequence(memory(10, watermark=0.1), 100) == 36


def test_a_window_holds_longer_sequences():
    windowed = memory(10, groups=[group(window=8)], budget=8)
    assert longest_sequence(windowed, 1000) == 1000


def test_a_pool_without_room_for_a_token_says_so():
    assert longest_sequence(memory(1, watermark=0.99), 100) == 4


@settings(max_examples=100, deadline=None)
@given(
    num_blocks=st.integers(1, 40),
    window=st.integers(1, 30),
    watermark=st.sampled_from([0.0, 0.1, 0.3]),
    outputs=st.integers(1, 3),
)
def test_what_is_said_is_what_add_accepts(num_blocks, window, watermark, outputs):
    """Tokens of prompt and output; a single output token is drawn and never computed, so that it takes no memory."""
    groups = [group(), group("window", window=window)]
    scheduler = make_scheduler(groups=groups, num_blocks=num_blocks, watermark=watermark, budget=32)
    longest = longest_sequence(scheduler.memory, 200)
    most = longest if outputs == 1 else longest - outputs
    if most > 0:
        scheduler.add(make_request(most, outputs))
    if longest < 200:
        with pytest.raises(ValueError, match="raise kv_cache_memory_bytes or memory_utilization, or lower max_tokens"):
            scheduler.add(make_request(max(most, 0) + 1, outputs))
