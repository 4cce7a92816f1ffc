"""The memory simulation's plot: marks that can be told apart, and what has none."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from jpaged.benchmarks import memory_page, memory_plots
from jpaged.benchmarks.memory_simulation import SYSTEMS


def results(**batches: list[float]) -> SimpleNamespace:
    """Mean batches of each model, by `SYSTEMS`."""
    models = {model: [SimpleNamespace(batch=batch) for batch in its] for model, its in batches.items()}
    return SimpleNamespace(models=models)


def test_marks_of_equal_batches_do_not_cover_each_other():
    found = results(one=[4.0] * 6, two=[4.0] * 5 + [8.0])
    marks = [memory_plots.points(found, number) for number in range(len(SYSTEMS))]
    places = sorted(place for mine, _ in marks for place in mine)
    assert len(places) == 2 * len(SYSTEMS)
    assert min(right - left for left, right in pairwise(places)) == pytest.approx(0.1)
    assert [ratios for _, ratios in marks] == [[1.0, 1.0]] * 5 + [[1.0, 2.0]]


def test_what_has_no_mark_is_named():
    found = results(one=[0.0] + [4.0] * 5, two=[0.0, 0.0] + [4.0] * 4, three=[1.0] * 6)
    assert [len(memory_plots.points(found, number)[0]) for number in range(3)] == [1, 2, 3]
    told = f"{SYSTEMS[0]} with one and two; {SYSTEMS[1]} with two"
    assert "; ".join(memory_plots.unmarked(found)) == told
    assert memory_page._marks(found).endswith(f"There is none where no request of the model fits: {told}.")
    assert "There is none" not in memory_page._marks(results(three=[1.0] * 6))


def test_a_model_that_the_largest_page_cannot_hold_has_no_marks():
    found = results(one=[1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    assert all(memory_plots.points(found, number) == ([], []) for number in range(len(SYSTEMS)))
