"""Drafts from a sequence's own tokens: where they are found, how likely they are kept, how many are made."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.scheduling.speculation import ngram
from jpaged.scheduling.speculation.base import Acceptance, StepCosts, best_length
from jpaged.scheduling.speculation.ngram import MOST_COMPARED, Match, NGramIndex, continuation

COSTS = StepCosts(token=0.05, verifying=0.2)


def slow_match(tokens: list[int], longest: int, shortest: int) -> Match | None:
    for size in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[len(tokens) - size :]:
                length = size
                while length < min(start, MOST_COMPARED) and tokens[start - 1 - length] == tokens[-1 - length]:
                    length += 1
                return Match(start, length)
    return None


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_longest_run_is_found_where_it_stood_last_however_tokens_come(tokens, longest, shortest, data):
    longest, shortest = max(longest, shortest), min(longest, shortest)
    index, known = NGramIndex(longest, shortest), 0
    while known < len(tokens):
        known = data.draw(st.integers(known + 1, len(tokens)))
        assert index.match(tokens[:known]) == slow_match(tokens[:known], longest, shortest)


def test_a_long_prompt_is_taken_in_over_several_look_ups(monkeypatch):
    monkeypatch.setattr(ngram, "MOST_INDEXED", 3)
    index, tokens = NGramIndex(2, 1), [1, 2, 3, 4, 1, 5, 6, 1]
    assert [index.match(tokens) for _ in range(4)] == [Match(1, 1), Match(5, 1), Match(5, 1), Match(5, 1)]
    assert index.match([*tokens, 5]) == Match(6, 2)


def test_a_run_that_reaches_the_end_repeats_itself():
    tokens = [9, 1, 2, 3, 1, 2, 3]
    match = NGramIndex(3, 1).match(tokens)
    assert match == Match(4, 3)
    assert continuation(tokens, match.start, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_rates_begin_as_expected_and_follow_what_happens():
    acceptance = Acceptance([0.2, 0.8], weight=8)
    assert acceptance.rate(0) == pytest.approx(0.2)
    for _ in range(500):
        acceptance.note(0, kept=1, lost=0)
    assert acceptance.rate(0) > 0.95 and acceptance.rate(1) == pytest.approx(0.8)
    for _ in range(1200):
        acceptance.note(0, kept=0, lost=1)
    assert acceptance.rate(0) < 0.1, "what is long ago fades"


@given(st.lists(st.floats(0, 1), max_size=12), st.integers(1, 64), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_the_number_of_drafts_makes_a_token_cheapest(rates, batch, verifies, tile):
    costs = replace(COSTS, tile=tile)

    def cost_of_a_token(length: int) -> float:
        tokens = batch + sum(prod(rates[:i]) for i in range(1, length + 1))
        extra = costs.verifying if length and not verifies else 0
        rows = batch + length
        return (1 + costs.token * (rows - 1) + tile * (-(-rows // 8) - 1) + extra) / tokens

    best = best_length(rates, costs, batch=batch, verifies=verifies)
    assert 0 <= best <= len(rates)
    assert cost_of_a_token(best) <= min(map(cost_of_a_token, range(len(rates) + 1))) + 1e-3


def test_drafts_end_where_they_do_not_pay():
    assert best_length([0.05] * 8, COSTS, batch=1, verifies=False) == 0
    assert best_length([0.95] * 8, COSTS, batch=1, verifies=False) == 8
    dear = StepCosts(token=0.5, verifying=0.2)
    alone, together = (best_length([0.7] * 8, dear, batch=batch, verifies=False) for batch in (1, 32))
    assert together <= alone


def test_what_one_pass_makes_all_drafts_for_is_paid_once():
    each, block = replace(COSTS, draft=0.3), replace(COSTS, block=0.3)
    one_by_one, at_once = (best_length([0.7] * 8, costs, batch=1, verifies=False) for costs in (each, block))
    assert 0 < one_by_one < at_once
    dear = replace(COSTS, block=3.0)
    assert best_length([0.7] * 8, dear, batch=1, verifies=False) == 0
    assert best_length([0.7] * 8, dear, batch=1, verifies=True) > 0


def test_drafts_end_where_a_tile_of_rows_is_full_unless_those_behind_it_pay_for_another():
    costs = replace(COSTS, tile=0.5)
    assert best_length([0.9] * 12, COSTS, batch=1, verifies=False) > 7
    assert best_length([0.9] * 12, costs, batch=1, verifies=False) == 7
    assert best_length([1.0] * 12, costs, batch=1, verifies=False) == 12
    assert best_length([0.6] * 12, costs, batch=8, verifies=True) == 0


def test_drafts_go_on_behind_an_unlikely_one_whose_followers_are_likely():
    assert best_length([0.3] * 8, COSTS, batch=1, verifies=False) < 3
    assert best_length([0.3] + [0.95] * 7, COSTS, batch=1, verifies=False) == 8
