"""The benchmark of towers runs all of its measures on a small model."""

import pytest

from scripts.benchmarks.towers import towers


def test_a_measure_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="--measures has 'speed': it takes tower, first token, questions"):
        list(towers(measures=["tower", "speed"]))


@pytest.mark.nightly
def test_each_measure_compares_with_transformers():
    rows = list(towers([16], ["float32"], text=[128, 1], tower=[128, 2], questions=2, tokens=2, rounds=1))
    assert [row["measure"] for row in rows] == ["tower", "first token", "questions"]
    assert all(row["times"] > 0 and row["by processor"] > 0 for row in rows)
    assert [name for name in rows[2] if "uncached" in name] == ["times uncached", "by processor uncached"]
