"""Counts that go on from step to step are those of the whole history."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jpaged import SamplingParams
from jpaged.execution.sampling.token_counts import TokenEdits, count_new, token_edits
from jpaged.scheduling import Request, Sequence

tokens = st.lists(st.integers(0, 6), max_size=6)


def sequence(prompt: list[int], **params) -> tuple[Request, Sequence]:
    seq = Sequence(0, 0, [*prompt], len(prompt))
    return Request(0, prompt, SamplingParams(**params), 0, 99, frozenset(), frozenset(), [seq]), seq


def by_token(edits: TokenEdits) -> dict[int, tuple[float, int, bool]]:
    ids, *columns = (column.tolist() for column in edits)
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, zip(*columns, strict=True), strict=True))


@given(
    prompt=tokens.filter(bool),
    steps=st.lists(tokens, max_size=8),
    repetition=st.sampled_from([1.0, 1.5]),
    presence=st.sampled_from([0.0, 0.5]),
    bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-1.0, 2.0]), max_size=3),
)
def test_counts_of_each_step_are_those_of_its_whole_history(prompt, steps, repetition, presence, bias):
    request, seq = sequence(prompt, repetition_penalty=repetition, presence_penalty=presence, logit_bias=bias)
    for new in steps:
        seq.token_ids.extend(new)
        assert by_token(count_new(request, seq)) == by_token(token_edits(request.params, seq.num_prompt, seq.token_ids))


def test_a_beam_that_goes_on_from_another_one_is_counted_anew():
    request, seq = sequence([1, 2], presence_penalty=1.0)
    seq.token_ids += [3, 3]
    assert by_token(count_new(request, seq)) == {3: (0, 2, True)}
    seq.token_ids = [1, 2, 4, 5, 6]
    assert by_token(count_new(request, seq)) == dict.fromkeys((4, 5, 6), (0, 1, True))


def test_counts_have_room_for_any_number_of_tokens():
    request, seq = sequence([0], frequency_penalty=1.0)
    for token in range(200):
        seq.token_ids.append(token)
        found = count_new(request, seq)
    assert np.array_equal(found.ids, np.arange(200)) and (found.times == 1).all() and found.seen.all()
