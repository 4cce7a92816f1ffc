"""Padding is told from tokens of a sequence that are the one that pads."""

from __future__ import annotations

import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.integrations.padding import after_first, before_last, completed

PAD, OTHER = 2, 9
ROWS = st.integers(1, 8).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from([PAD, 5, 7, OTHER]), min_size=width, max_size=width), min_size=4, max_size=4
    )
)


@settings(deadline=None)
@given(ROWS)
def test_what_stands_between_the_first_and_the_last_is_no_padding(rows):
    tokens = jnp.asarray(rows)
    begun, going = after_first(tokens != PAD), before_last(tokens != PAD)
    for row, behind, before in zip(rows, begun.tolist(), going.tolist(), strict=True):
        assert behind == [any(token != PAD for token in row[: place + 1]) for place in range(len(row))]
        assert before == [any(token != PAD for token in row[place:]) for place in range(len(row))]


@settings(deadline=None)
@given(ROWS)
def test_a_completion_goes_to_its_last_token_and_has_the_one_end_that_pads(rows):
    for ends in ([], [OTHER], [PAD], [PAD, OTHER]):
        found = completed(jnp.asarray(rows), PAD, ends).tolist()
        for row, own in zip(rows, found, strict=True):
            length = max((place + 1 for place, token in enumerate(row) if token != PAD), default=0)
            ended = length > 0 and row[length - 1] in ends
            most = length + (PAD in ends and not ended)
            assert own == [place < most for place in range(len(row))]
