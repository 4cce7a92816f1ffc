"""Reads blocks from disk ahead of need, for requests that wait, into host memory; it holds no block of the pool."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jpaged.memory.disk.break_even import BreakEven
from jpaged.memory.disk.index import DiskIndex, StoredBlock
from jpaged.memory.disk.transfers import BlockStore, DiskRead
from jpaged.memory.hash_chain import HashChain, TokenSpan
from jpaged.memory.policies import Policy
from jpaged.memory.prefix_cache import PrefixCache, longest_prefix

if TYPE_CHECKING:
    import numpy as np


class WaitingRequest:
    """The reads of one request that waits.

    Args:
        chains: its empty hash chains, see `PrefixCache.chains`.

    Attributes:
        contents: bytes of blocks that were read for it, by group and digest.
        read: the read in progress; None = none.
        deadline: time after which the request stops waiting for it.
        num_bytes: size of all that was or is being read.
        seen: state of the pool and the disk, as `Prefetch.version` counts it, when it was last looked at.
        has_given_up: whether a read took too long, so that none is begun again.
    """

    def __init__(self, chains: dict[int, HashChain]) -> None:
        self.chains = chains
        self.contents: dict[tuple[int, bytes], np.ndarray] = {}
        self.read: DiskRead | None = None
        self.deadline = 0.0
        self.num_bytes = 0
        self.seen = -1
        self.has_given_up = False

    def cancel(self) -> None:
        """Cancel the read in progress."""
        if self.read is not None:
            self.read.is_cancelled = True
            self.read = None


logger = logging.getLogger(__name__)

LONGEST_WAIT = 5.0
"""Seconds (or twice the time of computing the tokens, if that is more) after which a request stops waiting."""


class Prefix(NamedTuple):
    """The beginning of a request, to be looked up.

    Attributes:
        tokens: all tokens to be computed.
        limit: most tokens that may be found.
        groups: policy and block size (tokens) of each layer group, for this request.
        chains: its empty hash chains, see `PrefixCache.chains`.
        spans: tokens that stand for images, see `TokenSpan`.
    """

    tokens: Sequence[int]
    limit: int
    groups: Sequence[tuple[Policy, int]]
    chains: dict[int, HashChain]
    spans: Sequence[TokenSpan] = ()


class Prefetch:
    """Chooses the blocks to read for each request, and bounds how long a request waits.

    Args:
        index: the blocks on disk.
        store: moves the bytes.
        break_even: weighs reading against computing.
        most_staged: most bytes that are read ahead for several requests; one alone may have more.

    Attributes:
        break_even: see the arguments.
        version: changes when the pool loses a block, or one can be read that could not before.
        failures: damaged blocks, and reads that took too long.
    """

    def __init__(self, index: DiskIndex, store: BlockStore, break_even: BreakEven, most_staged: int) -> None:
        self.break_even = break_even
        self.version = 0
        self._index = index
        self._store = store
        self._most_staged = most_staged
        self.failures = 0
        self._waiting: OrderedDict[int, WaitingRequest] = OrderedDict()
        self._num_staged = 0
        self._late: DiskRead | None = None

    def look(self, request_id: int, prefix: Prefix, cache: PrefixCache, now: float, *, is_next: bool) -> None:
        """Begin to read the blocks of a request's prefix that the pool lacks, if they are worth reading.

        Args:
            now: time in seconds, on the clock of `waits_for`.
            is_next: whether the request is the next to be admitted, so that blocks read for others may be dropped.
        """
        waiting = self._waiting.get(request_id)
        if waiting is None:
            if not len(self._index) or not self._store.is_open:
                return
            waiting = self._waiting[request_id] = WaitingRequest(prefix.chains)
        self._take(waiting)
        if waiting.read is not None or waiting.has_given_up or waiting.seen == self.version or not self._store.is_open:
            return
        if self._late is not None and not self._late.is_done:
            return  # the disk hangs: no other request should wait for it
        tokens, blocks = self._missing(waiting, prefix, cache)
        num_bytes = sum(block.num_bytes for block in blocks)
        if not blocks or not self.break_even.is_worth(tokens, num_bytes):
            waiting.seen = self.version
            return
        if not self._has_room(waiting, num_bytes, is_next=is_next):
            return
        waiting.seen = self.version
        for block in blocks:
            self._index.touch(block)
        waiting.read = DiskRead(blocks, [self._index.name(block) for block in blocks])
        waiting.deadline = now + max(LONGEST_WAIT, 2 * tokens * (self.break_even.seconds_per_token or 0))
        waiting.num_bytes += num_bytes
        self._num_staged += num_bytes
        self._store.read(waiting.read)

    def waits_for(self, request_id: int, now: float) -> DiskRead | None:
        """Return the read in progress for a request; None if there is none, or it takes too long."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return None
        self._take(waiting)
        if waiting.read is not None and now > waiting.deadline:
            logger.warning("%d bytes were not read from disk in time: they are computed", waiting.read.num_bytes)
            self._late = waiting.read
            waiting.cancel()
            waiting.has_given_up = True
            self.failures += 1
        return waiting.read

    def staged(self, request_id: int) -> Mapping[tuple[int, bytes], np.ndarray]:
        """Return the bytes of the blocks that were read for a request, by group and digest."""
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
        self._late = None

    @property
    def requests(self) -> list[int]:
        """Return the ids of the requests for which blocks were or are being read."""
        return list(self._waiting)

    def check(self) -> None:
        """Raise AssertionError where a count is wrong; for tests."""
        assert self._num_staged == sum(waiting.num_bytes for waiting in self._waiting.values()), "bytes read ahead"

    def _take(self, waiting: WaitingRequest) -> None:
        """Take over the result of a read that has ended."""
        read = waiting.read
        if read is None or not read.is_done:
            return
        waiting.read, waiting.seen = None, -1
        waiting.contents.update(read.contents)
        self.break_even.read(sum(map(len, read.contents.values())), read.seconds)
        for block in read.damaged:
            self._index.forget(block)
        if read.damaged:
            self.failures += len(read.damaged)
            logger.warning("%d blocks on disk are damaged: their tokens are computed", len(read.damaged))

    def _missing(self, waiting: WaitingRequest, prefix: Prefix, cache: PrefixCache) -> tuple[int, list[StoredBlock]]:
        """Return how many tokens more would be found if some blocks on disk were read, and these blocks."""
        here: list[list[bool]] = []
        there: list[list[StoredBlock | None]] = []
        for g, (policy, size) in enumerate(prefix.groups):
            wanted = policy.full_blocks(prefix.limit, 0, size)
            links = cache.links(waiting.chains, g, prefix.tokens, wanted)
            here.append([cache.find(g, link) is not None or (g, link.digest) in waiting.contents for link in links])
            there.append([self._index.readable(g, link) for link in links])
        either = [
            [hit or block is not None for hit, block in zip(hits, blocks, strict=True)]
            for hits, blocks in zip(here, there, strict=True)
        ]
        length = longest_prefix(prefix.groups, either, prefix.limit, prefix.spans)
        tokens = length - longest_prefix(prefix.groups, here, prefix.limit, prefix.spans)
        if tokens <= 0:
            return 0, []
        found = []
        for g, (policy, size) in enumerate(prefix.groups):
            for run in policy.for_prefix(length, 0).active_blocks(length, size):
                found += [block for i in run if not here[g][i] and (block := there[g][i]) is not None]
        return tokens, found

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
