"""What blocks cost: both sides of a comparison compute the same, and the tables have a row for each size."""

from __future__ import annotations

from scripts.benchmarks.block_costs import best_of, block_attention


def test_runs_take_turns_and_the_first_turn_does_not_count():
    calls: list[str] = []
    assert len(best_of(2, lambda: calls.append("a") or 0, lambda: calls.append("b") or 0)) == 2
    assert calls == ["a", "b"] * 3


def test_paged_attention_is_compared_for_every_size():
    rows = block_attention(sequences=2, context=40, sizes=[8, 16], rounds=1)
    assert [row["block size"] for row in rows] == [8, 16]
    assert all(row["times"] == row["paged, us"] / row["contiguous, us"] > 0 for row in rows)
