"""The rules of beam search, on candidates counted out by hand."""

from __future__ import annotations

import pytest

from jpaged.sampling_params import BeamSearchParams
from jpaged.scheduling.beam import BeamSearch, Continuation
from jpaged.scheduling.top_tokens import TokenRanking

EOS = 9


def ranking(**logprobs: float) -> TokenRanking:
    """``t3=-1.0``: token 3."""
    return TokenRanking(1, [int(name[1:]) for name in logprobs], list(logprobs.values()))


def search(width: int = 2, max_tokens: int = 8, *, eos=(EOS,), **options) -> BeamSearch:
    return BeamSearch(BeamSearchParams(width, max_tokens, **options), max_tokens, frozenset(eos))


def test_the_first_step_looks_at_one_beam_only():
    beam = search()
    same = ranking(t1=-0.5, t2=-1.0, t3=-2.0, t4=-3.0)
    assert beam.advance([[], []], [same, same]) == [Continuation(0, 1), Continuation(0, 2)]
    assert beam.logprobs == [-0.5, -1.0]


def test_both_best_candidates_may_come_from_one_beam():
    beam = search()
    beam.logprobs = [-1.0, -5.0]
    candidates = [ranking(t1=-0.5, t2=-1.5, t3=-9.0, t4=-9.5), ranking(t5=-0.5, t6=-1.0, t7=-2.0, t8=-3.0)]
    assert beam.advance([[1], [2]], candidates) == [Continuation(0, 1), Continuation(0, 2)]
    assert beam.logprobs == [-1.5, -2.5]


def test_an_ended_candidate_counts_only_among_the_best_of_the_beams_width():
    beam = search()
    beam.logprobs = [-1.0, -1.1]
    candidates = [ranking(t1=-0.5, t9=-3.0, t2=-4.0, t3=-5.0), ranking(t9=-0.6, t4=-1.0, t5=-6.0, t6=-7.0)]
    assert beam.advance([[1], [2]], candidates) == [Continuation(0, 1), Continuation(1, 4)]
    (only,) = beam.finished
    assert (only.token_ids, only.finish_reason) == ([2, EOS], "stop")
    assert only.logprob == pytest.approx(-1.7) and only.score == pytest.approx(-1.7 / 2)


@pytest.mark.parametrize(("penalty", "score"), [(0.0, -3.0), (1.0, -1.0), (2.0, -3.0 / 9), (-1.0, -9.0)])
def test_the_score_is_the_log_probability_over_the_length_to_the_power_of_the_penalty(penalty, score):
    beam = search(width=1, max_tokens=3, length_penalty=penalty)
    beam.logprobs = [-2.0]
    assert beam.advance([[1, 2]], [ranking(t3=-1.0, t4=-2.0)]) == []
    assert beam.finished[0].score == pytest.approx(score)
    assert (beam.finished[0].token_ids, beam.finished[0].finish_reason) == ([1, 2, 3], "length")


def ends_with(first_running: float, **options) -> bool:
    """Whether a search of two beams with two finished outputs of -1.0 and -2.0 a token is over, when its best running
    beam has this log-probability after 4 tokens."""
    beam = search(**options)
    beam.logprobs = [-1.5, -1.6]
    beam.advance([[1], [2]], [ranking(t9=-0.5, t3=-0.6, t4=-8.0, t5=-8.5), ranking(t9=-2.4, t6=-2.6, t7=-8.0, t8=-8.5)])
    assert len(beam.finished) == 1
    beam.logprobs = [-5.0, first_running + 1.0]
    outputs = [[1, 3, 3], [2, 6, 6]]
    candidates = [ranking(t9=-3.0, t1=-29.0, t2=-29.5, t3=-29.9), ranking(t4=-1.0, t5=-29.0, t6=-29.5, t7=-29.9)]
    going_on = beam.advance(outputs, candidates)
    assert [hypothesis.score for hypothesis in beam.finished] == pytest.approx([-1.0, -2.0])
    return not going_on


def test_without_early_stopping_it_ends_when_no_beam_would_be_better_now():
    assert not ends_with(-7.9)
    assert ends_with(-8.1)


def test_never_goes_on_while_a_beam_could_become_better_by_max_tokens():
    assert not ends_with(-8.1, early_stopping="never")
    assert not ends_with(-15.9, early_stopping="never")
    assert ends_with(-16.1, early_stopping="never")


def test_early_stopping_ends_with_as_many_finished_outputs_as_beams():
    assert ends_with(-0.1, early_stopping=True)


@pytest.mark.parametrize(("eos", "want"), [((), 6), ((1,), 6), ((1, 2), 9)])
def test_candidates_are_enough_for_all_beams_to_go_on(eos, want):
    assert search(3, eos=eos).num_candidates == want
