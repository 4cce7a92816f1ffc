"""The decodes that may end are found for all at once: none that ends is missed, and most others are left out."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from small_schedulers import make_request

from jpaged.scheduling.decode_ends import DecodeEnds
from jpaged.scheduling.request import Request, find_stop
from jpaged.scheduling.step import Decodes

rows = st.tuples(st.integers(1, 5), st.integers(2, 6), st.sampled_from([(), (1,), (2, 3)]), st.sampled_from([0, 3]))


def decodes_of(requests: list[Request]) -> Decodes:
    """Return the decodes of the newest token of each request."""
    seqs = [request.sequences[0] for request in requests]
    starts = np.array([len(seq.token_ids) - 1 for seq in seqs], np.int32)
    return Decodes(requests, seqs, starts, starts * 0, {}, [])


@given(st.lists(rows, min_size=1, max_size=5), st.data())
def test_no_row_that_ends_is_missed(rows, data):
    asked = [make_request(prompt, most, eos=eos, min_tokens=min(least, most)) for prompt, most, eos, least in rows]
    ends, running = DecodeEnds(), asked
    for now in range(1, 9):
        tokens = data.draw(st.lists(st.integers(0, 5), min_size=len(running), max_size=len(running)))
        found = ends.rows(decodes_of(running), tokens, float(now))
        for request, token in zip(running, tokens, strict=True):
            request.sequences[0].token_ids.append(token)
        stops = [find_stop(request, request.sequences[0]) for request in running]
        assert found >= {row for row, stop in enumerate(stops) if stop is not None}
        for row in found:  # it is the last token, or one that may stop it
            seq = running[row].sequences[0]
            stop_ids = frozenset().union(*(request.stop_ids for request in running))
            assert len(seq.token_ids) >= running[row].max_total_tokens or seq.token_ids[-1] in stop_ids
        running = [request for request, stop in zip(running, stops, strict=True) if stop is None]
    assert {request.first_token_time for request in asked} == {1.0}


def test_a_search_for_stop_strings_is_asked_for_every_token():
    ends, requests = DecodeEnds(), [make_request(3, 9), make_request(3, 9)]
    requests[1].sequences[0].stop_search = object()
    assert all(ends.rows(decodes_of(requests), [5, 5], 1.0) == {1} for _ in range(2))


def test_requests_that_ended_are_not_kept():
    ends, request = DecodeEnds(), make_request(3, 9)
    ends.rows(decodes_of([request]), [5], 1.0)
    known = weakref.ref(request)
    del request
    gc.collect()
    assert known() is None
