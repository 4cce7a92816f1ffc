"""Finds the decodes of a step that may end, so that the others need not be looked at one by one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import Decodes


class DecodeEnds:
    """Keeps the limits of the sequences that decode together, as long as these are the same."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []  # not their requests, which may hold pictures
        self._stop_ids: frozenset[int] = frozenset()
        self._most = np.zeros(0, np.int64)
        self._always: frozenset[int] = frozenset()
        self._begin: list[Request] = []

    def rows(self, decodes: Decodes, tokens: Seq[int], now: float) -> frozenset[int]:
        """Return all rows that may end, to be checked by `find_stop`; note the first tokens of requests.

        Args:
            tokens: those that the rows drew.
        """
        if decodes.seqs != self._seqs:
            self._look_at(decodes)
        for request in self._begin:
            if request.live and request.first_token_time is None:
                request.first_token_time = now
        self._begin = []
        rows = self._always
        if not self._stop_ids.isdisjoint(tokens):
            rows |= {row for row, token in enumerate(tokens) if token in self._stop_ids}
        # A sequence has its drawn token and all up to the decoded one.
        long = decodes.starts + 2 >= self._most
        return rows | {*np.flatnonzero(long).tolist()} if long.any() else rows

    def _look_at(self, decodes: Decodes) -> None:
        requests, self._seqs = decodes.requests, decodes.seqs
        self._stop_ids = frozenset().union(*{request.stop_ids for request in requests})
        self._most = np.array([request.max_total_tokens for request in requests])
        self._always = frozenset(row for row, seq in enumerate(decodes.seqs) if seq.stop_search is not None)
        self._begin = [request for request in requests if request.first_token_time is None]
