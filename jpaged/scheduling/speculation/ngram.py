"""Drafts that a sequence's own tokens suggest (prompt lookup: Saxena, 2023; Yang et al., arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jpaged.scheduling.hooks import allowed_ahead
from jpaged.scheduling.request import Sequence
from jpaged.scheduling.speculation.base import Acceptance, Speculation, StepCosts, best_length
from jpaged.speculative import NGram

MOST_COMPARED = 32
"""Tokens before a match that are compared at most to tell how long it is."""

MOST_INDEXED = 2048
"""Tokens that are indexed at most in one look-up: a long prompt is taken in over the steps after it, as 100,000 tokens
at once would hold all sequences up for a third of a second."""


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

    def match(self, token_ids: Seq[int]) -> Match | None:
        """Return where the last of `token_ids`, which are those of the last call and new ones, stood latest before, as
        far as these are indexed: the oldest first, `MOST_INDEXED` a call."""
        length = len(token_ids)
        stop = min(length, self._num_indexed + 1 + MOST_INDEXED)
        # A run is known once a token follows it, so that the last tokens do not find themselves.
        for end in range(self._num_indexed + 1, stop):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, stop - 1)
        for size in self._sizes:
            if size < length and (start := self._after.get(tuple(token_ids[length - size :]))) is not None:
                return Match(start, _agreeing(token_ids, start, size))
        return None


def continuation(token_ids: Seq[int], start: int, most: int) -> list[int]:
    """Return the `most` tokens from position `start` on; after the sequence's end they repeat themselves."""
    period = len(token_ids) - start
    found = list(token_ids[start : start + most])
    while len(found) < most:
        found.append(found[-period])
    return found


def _agreeing(token_ids: Seq[int], start: int, known: int) -> int:
    """Return how many tokens before `start` are the sequence's last ones, of which `known` are known to be."""
    length, limit = len(token_ids), min(start, MOST_COMPARED)
    while known < limit and token_ids[start - 1 - known] == token_ids[length - 1 - known]:
        known += 1
    return known


_BOUNDS = (1, 2, 3, 4, 6, 9, 16)
"""Least lengths of the matches in each class: the more tokens agree, the likelier the next one does."""
_EXPECTED = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
_WEIGHT = 8.0


class NGramSpeculation(Speculation):
    """Looks up the last tokens of each sequence among its earlier ones.

    The probability that the token after a match comes again is learnt from every token, whether it was drafted or not,
    by the match's length: so nothing has to be tried out, and where text does not repeat itself no draft is made.

    Args:
        settings: lengths of runs and drafts.
        costs: cost of steps on this device.
    """

    def __init__(self, settings: NGram, costs: StepCosts) -> None:
        super().__init__(settings.tokens)
        self._settings = settings
        self._costs = costs
        self._acceptance = Acceptance(_EXPECTED, _WEIGHT)
        self._lookups: WeakKeyDictionary[Sequence, _Lookup] = WeakKeyDictionary()

    def took(self, seq: Sequence) -> None:
        lookup, token_ids = self._of(seq), seq.token_ids
        match = lookup.match
        if match is not None and lookup.length == len(token_ids) - 1:
            kept = token_ids[match.start] == token_ids[-1]
            self._acceptance.note(_class(match.length), kept=kept, lost=not kept)
        lookup.match, lookup.length = lookup.index.match(token_ids), len(token_ids)

    def data(self) -> dict[str, Any]:
        return {**super().data(), "acceptance": self._acceptance.data()}

    def load(self, data: Mapping[str, Any]) -> None:
        super().load(data)
        self._acceptance.load(data["acceptance"])

    def _worth_waiting(self, seq: Sequence, most: int, batch: int) -> bool:
        return self._length(self._of(seq).match, most, batch=batch, verifies=False) > 0

    def _draft(self, seq: Sequence, most: int, *, batch: int, verifies: bool) -> tuple[int, ...]:
        lookup = self._of(seq)
        if lookup.length != len(seq.token_ids):
            self.took(seq)
        if lookup.match is None:
            return ()
        length = self._length(lookup.match, most, batch=batch, verifies=verifies)
        drafts = tuple(continuation(seq.token_ids, lookup.match.start, length))
        return drafts if seq.grammar is None else drafts[: allowed_ahead(seq.grammar, drafts)]

    def _length(self, match: Match | None, most: int, *, batch: int, verifies: bool) -> int:
        if match is None:
            return 0
        # After a draft that is kept, the match is a token longer.
        rates = [self._acceptance.rate(_class(match.length + kept)) for kept in range(most)]
        return best_length(rates, self._costs, batch=batch, verifies=verifies)

    def _of(self, seq: Sequence) -> _Lookup:
        lookup = self._lookups.get(seq)
        if lookup is None:
            lookup = self._lookups[seq] = _Lookup(NGramIndex(self._settings.longest, self._settings.shortest))
        return lookup


class _Lookup:
    """The index of one sequence, and where its newest token was found.

    Attributes:
        match: where the last tokens stood before; None = nowhere.
        length: number of tokens that the sequence had at the last look-up.
    """

    def __init__(self, index: NGramIndex) -> None:
        self.index = index
        self.match: Match | None = None
        self.length = 0


def _class(length: int) -> int:
    return sum(length >= bound for bound in _BOUNDS) - 1
