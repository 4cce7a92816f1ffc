"""Tests that places of an output are matched as an engine matches them, and that steps' tokens and costs add up."""

from __future__ import annotations

import pytest

from jpaged import NGram
from jpaged.scheduling.speculation import StepCosts
from scripts.benchmarks.draft_branches import Place, Shape, places_of, tokens_of_cost

COSTS = StepCosts(token=0.1, verifying=0.5)


def test_a_second_branch_is_the_latest_match_that_goes_on_with_another_token():
    # After "7" came 1 2, then 3 4, then 3 5: the latest match is "3 5", the latest other one "1 2".
    places = places_of([7, 1, 2, 7, 3, 4, 7, 3, 5, 7], [1, 2, 9], NGram(longest=1, shortest=1), 8)

    assert places[0] == Place(chain=0, branch=2)


def test_a_place_without_a_match_has_no_drafts():
    assert places_of([1, 2, 3], [4], NGram(longest=2, shortest=1), 8) == [Place(None, None)]


def test_longer_matches_come_before_later_ones():
    places = places_of([1, 2, 8, 0, 2, 9, 1, 2], [8], NGram(longest=2, shortest=1), 8)

    assert places == [Place(chain=1, branch=0)]


def test_a_step_keeps_the_better_branch_and_pays_for_both():
    # The first step drafts four tokens and keeps both of the branch's; then one token is left, without drafts.
    output = [Place(0, 2), Place(None, None), Place(None, None), Place(None, None)]

    assert tokens_of_cost([output], Shape(2, 2), COSTS) == pytest.approx(4 / (1 + 4 * 0.1 + 0.5 + 1))
    assert tokens_of_cost([output], Shape(2), COSTS) == pytest.approx(4 / (1 + 2 * 0.1 + 0.5 + 3))
