"""Counts the tokens of a row for its bias and penalties: once as a whole, then token by token as they come."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, Float, Int

from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.request import Request, Sequence


class TokenEdits(NamedTuple):
    """Holds the tokens of one row whose logit may change, each once: bias, how often generated, whether the row has
    it."""

    ids: Int[np.ndarray, " tokens"]
    bias: Float[np.ndarray, " tokens"]
    times: Int[np.ndarray, " tokens"]
    seen: Bool[np.ndarray, " tokens"]


def token_edits(params: SamplingParams, num_prompt: int, token_ids: list[int]) -> TokenEdits:
    """Return the edits of a row by bias and penalties, for the tokens that the host knows."""
    bias = params.logit_bias or {}
    start = 0 if params.repetition_penalty != 1 else num_prompt
    history = np.array(token_ids[start:] if params.penalised else [], np.int64)
    ids, place = np.unique(np.concatenate([np.array([*bias], np.int64), history]), return_inverse=True)
    of_bias, of_history = place[: len(bias)], place[len(bias) :]
    size = len(ids)
    return TokenEdits(
        ids,
        np.bincount(of_bias, weights=[*bias.values()], minlength=size),
        np.bincount(of_history[num_prompt - start :], minlength=size),
        np.bincount(of_history, minlength=size) > 0,
    )


class TokenCounts:
    """Keeps the `token_edits` of a sequence up to date. New tokens come at the end, whatever their ids.

    Args:
        token_ids: the sequence's own list, to which tokens are only ever appended.
    """

    def __init__(self, params: SamplingParams, num_prompt: int, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._known = len(token_ids)
        self._penalised = params.penalised
        self._columns = token_edits(params, num_prompt, token_ids)
        self._size = len(self._columns.ids)
        self._place = {token: place for place, token in enumerate(self._columns.ids.tolist())}

    def are_of(self, seq: Sequence) -> bool:
        """Tell whether these are counts of the list that a sequence has now, which a beam replaces."""
        return self._token_ids is seq.token_ids and self._known <= len(seq.token_ids)

    def edits(self) -> TokenEdits:
        """Return the edits by all tokens so far, as views that later calls change."""
        if self._penalised and len(self._token_ids) > self._known:
            for token in self._token_ids[self._known :]:
                self._count(token)
        self._known = len(self._token_ids)
        ids, bias, times, seen = self._columns
        size = self._size
        return TokenEdits(ids[:size], bias[:size], times[:size], seen[:size])

    def _count(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._size
            if place == len(self._columns.ids):  # room for as many again
                self._columns = TokenEdits(
                    *(np.concatenate([c, np.zeros(max(16, place), c.dtype)]) for c in self._columns)
                )
            self._columns.ids[place] = token
            self._size += 1
        self._columns.times[place] += 1
        self._columns.seen[place] = True


_COUNTS: WeakKeyDictionary[Sequence, TokenCounts] = WeakKeyDictionary()
"""Keeps the counts of each sequence, as long as it lives."""


def count_new(request: Request, seq: Sequence) -> TokenEdits:
    """Count the tokens that came to a sequence since the last call, and return the edits of its row."""
    counts = _COUNTS.get(seq)
    if counts is None or not counts.are_of(seq):
        counts = _COUNTS[seq] = TokenCounts(request.params, seq.num_prompt, seq.token_ids)
    return counts.edits()
