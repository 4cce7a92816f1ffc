"""What is worth reading follows from what was measured."""

from __future__ import annotations

import pytest

from jpaged.memory.tiers import BreakEven


def known(seconds_per_token: float = 0.001, **speeds) -> BreakEven:
    even = BreakEven(**({"latency": 0.0, "read_rate": 1e6} | speeds))
    for _ in range(3):
        even.computed(100, 100 * seconds_per_token)
    return even


def test_nothing_is_read_before_steps_were_timed():
    even = BreakEven(latency=0.0, read_rate=1e12)
    for _ in range(2):
        even.computed(100, 1.0)
        assert even.seconds_per_token is None and not even.is_worth(1000, 1) and even.tokens(8, lambda n: n) is None
    even.computed(100, 1.0)
    assert even.seconds_per_token == pytest.approx(0.01) and even.is_worth(1000, 1)


def test_a_step_that_had_to_compile_does_not_count():
    even = known()
    even.computed(100, 60.0)
    assert even.seconds_per_token == pytest.approx(0.001)


@pytest.mark.parametrize(("latency", "first"), [(0.0, 16), (0.0079, 16), (0.0081, 32), (0.079, 160), (10.0, 20_000)])
def test_the_latency_sets_the_shortest_prefix(latency, first):
    even = known(latency=latency)  # 500 bytes a token take half as long as computing it
    assert even.tokens(16, lambda tokens: 500 * tokens) == pytest.approx(first, abs=16)
    least = even.tokens(16, lambda tokens: 500 * tokens)
    assert even.is_worth(least, 500 * least) and not even.is_worth(least - 16, 500 * (least - 16))


def test_where_bytes_come_slower_than_tokens_are_computed_nothing_is_worth_it():
    assert known().tokens(16, lambda tokens: 1001 * tokens) is None


def test_layers_that_keep_a_window_make_long_prefixes_cheap():
    even = known(latency=0.01)
    assert even.tokens(16, lambda tokens: 2000 * min(tokens, 128)) == 272  # 0.01 s and 0.256 s for 128 tokens of KV


def test_a_given_number_of_tokens_needs_no_measurement():
    even = BreakEven(latency=9.0, read_rate=1.0, min_tokens=40)
    assert even.is_worth(40, 10**9) and not even.is_worth(39, 1)
    assert even.tokens(16, lambda tokens: tokens) == 48


def test_reads_change_the_rate_bit_by_bit():
    even = known(latency=0.001)
    even.read(10**6, 0.0015)
    assert even.read_rate == 1e6, "hardly longer than the latency"
    for _ in range(100):
        even.read(10**6, 0.501)
    assert even.read_rate == pytest.approx(2e6, rel=1e-3)
