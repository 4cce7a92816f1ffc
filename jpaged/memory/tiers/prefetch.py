"""Reads blocks of tiers ahead of need, for requests that wait, into host memory; it holds no block of the pool."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jpaged.memory.hash_chain import HashChain, Link, TokenSpan
from jpaged.memory.policies import Policy
from jpaged.memory.prefix_cache import PrefixCache, longest_prefix
from jpaged.memory.tiers.index import StoredBlock
from jpaged.memory.tiers.tier import Tier
from jpaged.memory.tiers.transfers import TierRead

if TYPE_CHECKING:
    import numpy as np


logger = logging.getLogger(__name__)

MOST_CHANGES = 1 << 16
"""Changed contents that are remembered."""

LONGEST_WAIT = 5.0
"""Seconds (or twice the time of computing the tokens, if that is more) after which a request stops waiting."""


class Staged(NamedTuple):
    """A block that was read.

    Attributes:
        tier: number of the tier that it comes from.
        content: its bytes.
    """

    tier: int
    content: np.ndarray


class WaitingRequest:
    """The reads of one request that waits.

    Args:
        chains: its empty hash chains, see `PrefixCache.chains`.

    Attributes:
        contents: the blocks that were read for it, by group and digest.
        reads: the reads in progress, by the number of the tier.
        deadline: time after which the request stops waiting for them.
        num_bytes: size of all that was or is being read.
        seen: end of `Prefetch.changes` when it was last looked at.
        names: digests of its prefix then.
        usable: numbers of the tiers that worked then.
        has_given_up: whether a read took too long, so that none is begun again.
    """

    def __init__(self, chains: dict[int, HashChain]) -> None:
        self.chains = chains
        self.contents: dict[tuple[int, bytes], Staged] = {}
        self.reads: dict[int, TierRead] = {}
        self.deadline = 0.0
        self.num_bytes = 0
        self.seen = -1
        self.names: frozenset[bytes] = frozenset()
        self.usable: list[int] = []
        self.has_given_up = False

    def cancel(self) -> None:
        """Cancel the reads in progress."""
        for read in self.reads.values():
            read.is_cancelled = True
        self.reads = {}


class ChangedContents:
    """Contents that the pool lost, or that a tier can read since: the last ones, by digest, in order.

    A request that waits is looked up again only after its own prefix has changed; in a full pool something changes in
    every step.
    """

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._first = 0

    @property
    def end(self) -> int:
        """Return how many there were so far."""
        return self._first + len(self._digests)

    def add(self, *digests: bytes) -> None:
        """Add contents."""
        self._digests += digests
        if len(self._digests) > MOST_CHANGES:
            del self._digests[: MOST_CHANGES // 2]
            self._first += MOST_CHANGES // 2

    def add_all(self) -> None:
        """Let every content count as changed."""
        self._first = self.end + 1
        self._digests = []

    def concern(self, names: frozenset[bytes], since: int) -> bool:
        """Tell whether one of some contents has changed since the end was there."""
        if since < self._first:
            return True
        return since < self.end and not names.isdisjoint(self._digests[since - self._first :])


class Content(NamedTuple):
    """A content that a request will hold as a whole, such as an image's features.

    Attributes:
        group: number of its layer group.
        links: the names of its blocks.
        cost: what making it costs, in tokens of the model.
        stop: position after the last token that needs it.
        is_here: whether the pool has it.
    """

    group: int
    links: Sequence[Link]
    cost: int
    stop: int
    is_here: bool


class Prefix(NamedTuple):
    """The beginning of a request, to be looked up.

    Attributes:
        tokens: all tokens to be computed.
        limit: most tokens that may be found.
        groups: policy and block size (tokens) of each layer group, for this request.
        chains: its empty hash chains, see `PrefixCache.chains`.
        spans: tokens that stand for images, see `TokenSpan`.
        contents: returns what the request will hold; not called while nothing has changed. None = nothing.
    """

    tokens: Sequence[int]
    limit: int
    groups: Sequence[tuple[Policy, int]]
    chains: dict[int, HashChain]
    spans: Sequence[TokenSpan] = ()
    contents: Callable[[], Sequence[Content]] | None = None


class Prefetch:
    """Chooses the blocks to read for each request, and bounds how long a request waits.

    Args:
        tiers: where blocks lie; the first that has one is read.
        most_staged: most bytes that are read ahead for several requests; one alone may have more.

    Attributes:
        changes: the contents whose blocks the pool lost, or that can be read and could not before.
    """

    def __init__(self, tiers: Sequence[Tier], most_staged: int) -> None:
        self.changes = ChangedContents()
        self._tiers = tiers
        self._most_staged = most_staged
        self._waiting: OrderedDict[int, WaitingRequest] = OrderedDict()
        self._num_staged = 0
        self._late: dict[int, TierRead] = {}

    def look(self, request_id: int, prefix: Prefix, cache: PrefixCache, now: float, *, is_next: bool) -> None:
        """Begin to read the blocks of a request's prefix that the pool lacks, if they are worth reading.

        It does nothing where `is_current`; a caller that asks this first spares making the prefix.

        Args:
            now: time in seconds, on the clock of `waits_for`.
            is_next: whether the request is the next to be admitted, so that blocks read for others may be dropped.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None:
            for tier in self._tiers:
                tier.refresh(now)
            if not any(len(tier.index) and tier.is_open for tier in self._tiers):
                return
            waiting = self._waiting[request_id] = WaitingRequest(prefix.chains)
        if self.is_current(request_id):
            return
        usable = self._usable()
        contents = prefix.contents() if prefix.contents is not None else ()
        tokens, blocks = self._missing(waiting, prefix, contents, cache, usable)
        num_bytes = sum(block.num_bytes for mine in blocks.values() for block in mine)
        if blocks and not self._has_room(waiting, num_bytes, is_next=is_next):
            return
        waiting.seen, waiting.usable = self.changes.end, usable
        named = (*(chain.links for chain in waiting.chains.values()), *(content.links for content in contents))
        waiting.names = frozenset([link.digest for links in named for link in links])
        if not blocks:
            return
        computing = self._tiers[0].break_even.seconds_per_token or 0
        waiting.deadline = now + max(LONGEST_WAIT, 2 * tokens * computing)
        waiting.num_bytes += num_bytes
        self._num_staged += num_bytes
        for number, mine in blocks.items():
            tier = self._tiers[number]
            for block in mine:
                tier.index.touch(block)
            waiting.reads[number] = read = TierRead(mine, [tier.block_name(block) for block in mine])
            tier.store.read(read)

    def is_current(self, request_id: int) -> bool:
        """Take over the reads that have ended, and tell whether `look` would find no more for a request than it did
        when it was called last."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        self._take(waiting)
        if waiting.reads or waiting.has_given_up or not (usable := self._usable()):
            return True
        if waiting.usable != usable or self.changes.concern(waiting.names, waiting.seen):
            return False
        waiting.seen = self.changes.end
        return True

    def waits_for(self, request_id: int, now: float) -> TierRead | None:
        """Return a read in progress for a request; None if there is none, or it takes too long."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return None
        self._take(waiting)
        if waiting.reads and now > waiting.deadline:
            for number, read in waiting.reads.items():
                tier = self._tiers[number]
                logger.warning("%d bytes were not read from %s in time: they are computed", read.num_bytes, tier.name)
                tier.counters.failures += 1
            self._late |= waiting.reads
            waiting.cancel()
            waiting.has_given_up = True
        return next(iter(waiting.reads.values()), None)

    def staged(self, request_id: int) -> Mapping[tuple[int, bytes], Staged]:
        """Return the blocks that were read for a request, by group and digest."""
        waiting = self._waiting.get(request_id)
        return {} if waiting is None else waiting.contents

    def let_go(self, request_id: int) -> None:
        """Drop all reads of a request."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.cancel()
            self._num_staged -= waiting.num_bytes

    def clear(self) -> None:
        """Drop all reads."""
        for waiting in self._waiting.values():
            waiting.cancel()
        self._waiting.clear()
        self._num_staged = 0
        self._late = {}

    @property
    def requests(self) -> list[int]:
        """Return the ids of the requests for which blocks were or are being read."""
        return list(self._waiting)

    def check(self) -> None:
        """Raise AssertionError where a count is wrong; for tests."""
        assert self._num_staged == sum(waiting.num_bytes for waiting in self._waiting.values()), "bytes read ahead"

    def _usable(self) -> list[int]:
        """Return the numbers of the tiers that work and answer: no request should wait for another."""
        late = self._late
        return [
            number
            for number, tier in enumerate(self._tiers)
            if tier.is_open and (number not in late or late[number].is_done)
        ]

    def _take(self, waiting: WaitingRequest) -> None:
        """Take over the results of reads that have ended."""
        for number, read in list(waiting.reads.items()):
            if not read.is_done:
                continue
            del waiting.reads[number]
            waiting.seen = -1
            tier = self._tiers[number]
            waiting.contents.update((key, Staged(number, content)) for key, content in read.contents.items())
            tier.break_even.read(sum(map(len, read.contents.values())), read.seconds)
            for block in read.damaged:
                tier.index.forget(block)
            if read.damaged:
                tier.counters.failures += len(read.damaged)
                logger.warning(
                    "%d blocks of the %s tier are damaged: their tokens are computed", len(read.damaged), tier.name
                )

    def _missing(
        self,
        waiting: WaitingRequest,
        prefix: Prefix,
        contents: Sequence[Content],
        cache: PrefixCache,
        usable: Sequence[int],
    ) -> tuple[int, dict[int, list[StoredBlock]]]:
        """Return how many tokens more would be found if some blocks were read, and these blocks by tier.

        The last tiers are left out where what they add is not worth reading.
        """
        here: list[list[bool]] = []
        there: list[list[tuple[int, StoredBlock] | None]] = []
        for g, (policy, size) in enumerate(prefix.groups):
            links = cache.links(waiting.chains, g, prefix.tokens, policy.full_blocks(prefix.limit, 0, size))
            found, read = cache.find_all(g, links), waiting.contents
            hits = [block is not None or (g, link.digest) in read for block, link in zip(found, links, strict=True)]
            here.append(hits)
            there.append(self._places(usable, g, links, hits))
        chosen = self._best(prefix, here, there, usable) if any(map(any, there)) else (0, {})
        return self._with_contents(waiting, prefix, contents, here, chosen, usable) if contents else chosen

    def _best(
        self,
        prefix: Prefix,
        here: list[list[bool]],
        there: list[list[tuple[int, StoredBlock] | None]],
        usable: Sequence[int],
    ) -> tuple[int, dict[int, list[StoredBlock]]]:
        """Return what `_missing` does of the layers that tables are of."""
        cached: int | None = None
        best, chosen = 0.0, (0, dict[int, list[StoredBlock]]())
        for last in reversed(usable):
            either = [
                [hit or (place is not None and place[0] <= last) for hit, place in zip(hits, places, strict=True)]
                for hits, places in zip(here, there, strict=True)
            ]
            length = longest_prefix(prefix.groups, either, prefix.limit, prefix.spans)
            if not length:
                break
            if cached is None:
                cached = longest_prefix(prefix.groups, here, prefix.limit, prefix.spans)
            if length <= cached:
                break
            blocks: dict[int, list[StoredBlock]] = {}
            for g, (policy, size) in enumerate(prefix.groups):
                for run in policy.for_prefix(length, 0).active_blocks(length, size):
                    for i in run:
                        place = there[g][i]
                        if place is not None:
                            blocks.setdefault(place[0], []).append(place[1])
            saved = self._saved(length - cached, blocks)
            if saved > best:
                best, chosen = saved, (length - cached, blocks)
        return chosen

    def _with_contents(
        self,
        waiting: WaitingRequest,
        prefix: Prefix,
        contents: Sequence[Content],
        here: list[list[bool]],
        chosen: tuple[int, dict[int, list[StoredBlock]]],
        usable: Sequence[int],
    ) -> tuple[int, dict[int, list[StoredBlock]]]:
        """Add to blocks of a prefix those of the contents that the tokens after it need and the pool lacks."""
        tokens, blocks = chosen
        found = longest_prefix(prefix.groups, here, prefix.limit, prefix.spans) + tokens
        for content in contents:
            lacking = [link for link in content.links if (content.group, link.digest) not in waiting.contents]
            places = self._places(usable, content.group, lacking)
            if content.is_here or content.stop <= found or not all(places):
                continue
            mine: dict[int, list[StoredBlock]] = {}
            for number, stored in filter(None, places):
                mine.setdefault(number, []).append(stored)
            if mine and self._saved(content.cost, mine) > 0:
                tokens += content.cost
                for number, some in mine.items():
                    twice = {stored.digest for stored in blocks.get(number, ())}
                    blocks.setdefault(number, []).extend(stored for stored in some if stored.digest not in twice)
        return tokens, blocks

    def _places(
        self, usable: Sequence[int], g: int, links: Sequence[Link], is_here: Sequence[bool] = ()
    ) -> list[tuple[int, StoredBlock] | None]:
        """Return for each content the first tier that has it, and where; None of those that no tier has, and of those
        that are here."""
        places: list[tuple[int, StoredBlock] | None] = [None] * len(links)
        lacking = [i for i in range(len(links)) if not (is_here and is_here[i])]
        for number in usable:
            found = self._tiers[number].index.readable(g, [links[i] for i in lacking])
            for i, stored in zip(lacking, found, strict=True):
                if stored is not None:
                    places[i] = number, stored
            lacking = [i for i in lacking if places[i] is None]
        return places

    def _saved(self, tokens: int, blocks: Mapping[int, Sequence[StoredBlock]]) -> float:
        """Return the seconds that reading blocks saves, of tiers whose break-even is given in tokens any positive
        number; at most 0 = they are not worth reading."""
        computing = self._tiers[0].break_even.seconds_per_token
        reading = 0.0
        for number, mine in blocks.items():
            even = self._tiers[number].break_even
            if even.min_tokens is None and computing is None:
                return 0.0
            if even.min_tokens is None:
                reading += even.read_seconds(sum(block.num_bytes for block in mine))
            elif tokens < even.min_tokens:
                return 0.0
        return tokens * (computing or 1.0) - reading

    def _has_room(self, waiting: WaitingRequest, num_bytes: int, *, is_next: bool) -> bool:
        """Tell whether so many bytes more may be read ahead: within the bound, or if no other request has any. For the
        next request to be admitted, the bytes of the last ones are dropped."""
        while self._num_staged + num_bytes > self._most_staged and self._num_staged > waiting.num_bytes:
            if not is_next:
                return False
            last = next(
                key for key, other in reversed(self._waiting.items()) if other is not waiting and other.num_bytes
            )
            self.let_go(last)
        return True
