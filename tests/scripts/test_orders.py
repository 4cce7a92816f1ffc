"""The comparison of orders of placement and of eviction."""

from __future__ import annotations

import pytest

from scripts.benchmarks.orders import eviction_time, placement, tier_calls


def test_each_cell_of_placement_compares_steps():
    small, large = placement(models=["gpt-oss-20b"], block_sizes=[16, 128], loads=["agents"], requests=8, seeds=1)
    assert (small["GiB"], large["GiB"]) == (1, 4), "large pages are larger with the blocks"
    for row in (small, large):
        assert row["times"] == row["steps"] / row["packed"] <= 1


def test_eviction_is_compared_on_equal_loads():
    (row,) = eviction_time(models=["gpt-oss-20b"], loads=["agents"], requests=8, seeds=1)
    assert row["steps"] == 1 and row["found, points"] == pytest.approx(0) and row["time a step"] > 0


def test_host_memory_adds_less_than_half_of_a_steps_calls():
    (row,) = tier_calls(models=["gpt-oss-20b"], loads=["agents"], requests=8, seeds=1)
    assert 1 < row["times"] == row["with RAM"] / row["calls"] < 1.5
