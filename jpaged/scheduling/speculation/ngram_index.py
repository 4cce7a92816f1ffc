"""Where the last tokens of a sequence stood before (prompt lookup: Saxena, 2023; Yang et al., arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_COMPARED = 32
"""Tokens before a match that are compared at most to tell how long it is."""


class Match(NamedTuple):
    """The latest earlier place at which a sequence's last tokens stand.

    Attributes:
        start: position of the token that followed them there.
        length: number of last tokens that agree, up to `MOST_COMPARED`.
    """

    start: int
    length: int


class NGramIndex:
    """Finds the longest run of a sequence's last tokens that it had before; a token costs O(longest - shortest) once.

    Args:
        longest, shortest: lengths of the runs that are looked up.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def match(self, token_ids: Sequence[int]) -> Match | None:
        """Return where the last of `token_ids`, which are those of the last call and new ones, stood latest before."""
        length = len(token_ids)
        # A run is known once a token follows it, so that the last tokens do not find themselves.
        for end in range(self._num_indexed + 1, length):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, length - 1)
        for size in self._sizes:
            if size < length and (start := self._after.get(tuple(token_ids[length - size :]))) is not None:
                return Match(start, _agreeing(token_ids, start, size))
        return None


def continuation(token_ids: Sequence[int], start: int, most: int) -> list[int]:
    """Return the `most` tokens from position `start` on; behind the sequence's end they repeat themselves."""
    period = len(token_ids) - start
    found = list(token_ids[start : start + most])
    while len(found) < most:
        found.append(found[-period])
    return found


def _agreeing(token_ids: Sequence[int], start: int, known: int) -> int:
    """Return how many tokens before `start` are the sequence's last ones, of which `known` are known to be."""
    length, limit = len(token_ids), min(start, MOST_COMPARED)
    while known < limit and token_ids[start - 1 - known] == token_ids[length - 1 - known]:
        known += 1
    return known
