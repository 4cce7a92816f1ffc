"""Remembers the prefixes of recent requests: a prefix that several of them share is likely to come again."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.memory.block_tables import BlockTables
from jpaged.memory.layout import PoolLayout

MOST_REQUESTS = 128
"""Requests that count as recent, where no more than half as many have run at once."""


@dataclass
class Recent:
    """A recent request.

    Attributes:
        digests: names of its prefixes, shortest first, one for each length that can hit.
        num_prompt: number of digests that its prompt had; its generated tokens added the others.
        shared: number of digests that it had in common with an earlier recent request when it came.
        num_bytes: bytes that it held at its end; 0 while it runs.
    """

    digests: list[bytes]
    num_prompt: int
    shared: int
    num_bytes: int = 0


class Shared(NamedTuple):
    """Says what a request begins with that other recent requests began with.

    Attributes:
        tokens: how many leading tokens.
        goes_on: whether they hold the whole prompt of one of these.
    """

    tokens: int
    goes_on: bool


class RecentPrefixes:
    """Remembers the prefixes of recent requests by their names in the hash chains, salts and all.

    Args:
        layout: how the pool is cut.
        running: ids of the requests that have blocks, or had and are swapped; a view that follows them. They are
            remembered until they end, however many came after them.

    Attributes:
        entries: the recent requests by id, in order of arrival.
        most_requests: so many count as recent: twice as many as ever ran at once, and `MOST_REQUESTS` at least.
        chain_key: block size of the hash chains by which prefixes are named.
    """

    def __init__(self, layout: PoolLayout, running: Collection[int] = ()) -> None:
        self.entries: OrderedDict[int, Recent] = OrderedDict()
        self.most_requests = MOST_REQUESTS
        self._running = running
        self._uses: Counter[bytes] = Counter()
        self._ends: Counter[bytes] = Counter()
        self._num_digests = 0
        self._step = layout.prefix_step
        self.chain_key = max(group.spec.block_size for group in layout.groups if group.spec.policy.names_tokens)
        # A prefix is not recent if tokens for twice the pool have been requested since.
        self._most_digests = 2 * max(
            group.num_blocks * group.spec.policy.entries_apart(group.spec.block_size) for group in layout.groups
        )

    def look(self, sequence: BlockTables) -> Shared:
        """Return what a sequence, whose prompt is in its hash chains, shares with other recent requests; nothing is
        noted."""
        digests, own = self._digests(sequence), self.entries.get(sequence.request.request_id)
        mine, prompt = ([], 0) if own is None else (own.digests, own.num_prompt)

        def is_new(place: int) -> bool:
            return self._uses[digests[place]] == (digests[place : place + 1] == mine[place : place + 1])

        # A request that has a prefix has all shorter ones: bisect for the first that no other request has.
        shared = bisect_left(range(len(digests)), True, key=is_new)
        ends = {mine[prompt - 1]} if prompt else set()
        return Shared(shared * self._step, any(self._ends[digest] > (digest in ends) for digest in digests[:shared]))

    def arrived(self, sequence: BlockTables) -> Shared | None:
        """Note a request that begins to run and return what it shares; None where it is known, as one that was
        preempted is."""
        request_id = sequence.request.request_id
        known = self.entries.get(request_id)
        if known is not None:
            known.num_bytes = 0
            return None
        shared, digests = self.look(sequence), self._digests(sequence)
        self.remember(request_id, Recent(digests, len(digests), shared.tokens // self._step))
        return shared

    def ended(self, sequence: BlockTables) -> None:
        """Note the generated tokens of a sequence that was freed: they may be in the next request's prompt."""
        entry = self.entries.get(sequence.request.request_id)
        if entry is None:
            return
        digests = self._digests(sequence)
        if len(digests) > len(entry.digests):
            new = digests[len(entry.digests) :]
            self._uses.update(new)
            self._num_digests += len(new)
            entry.digests = digests

    def _digests(self, sequence: BlockTables) -> list[bytes]:
        every = self._step // self.chain_key
        return [link.digest for link in sequence.chains[self.chain_key].links[every - 1 :: every]]

    def remember(self, request_id: int, entry: Recent) -> None:
        """Add a request to the recent ones; the oldest that have ended go where they are too many."""
        self.entries[request_id] = entry
        self._uses.update(entry.digests)
        if entry.num_prompt:
            self._ends[entry.digests[entry.num_prompt - 1]] += 1
        self._num_digests += len(entry.digests)
        self.most_requests = max(self.most_requests, 2 * len(self._running))
        while len(self.entries) > self.most_requests or self._num_digests > self._most_digests:
            oldest = next((each for each in self.entries if each not in self._running), request_id)
            if oldest == request_id:
                break
            self._forget(oldest)

    def _forget(self, request_id: int) -> None:
        entry = self.entries.pop(request_id, None)
        if entry is not None:
            self._num_digests -= len(entry.digests)
            if entry.num_prompt:
                self._ends[entry.digests[entry.num_prompt - 1]] -= 1
            for digest in entry.digests:
                self._uses[digest] -= 1
                if not self._uses[digest]:
                    del self._uses[digest]
