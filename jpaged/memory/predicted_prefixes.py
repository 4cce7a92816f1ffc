"""Cached blocks worth more than room for one more request (Jenga, SOSP'25: the predicted prefix).

A prefix that several recent requests began with will be asked for again, while their other tokens will hardly be. So
of a request's blocks those that are active at the end of its predicted prefix, the longest prefix it shares with a
recent request, are protected when nobody owns them any more: new requests wait rather than evict them. (Running
ones do evict them before anybody is preempted, and so does a new one when nobody runs.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import BlockTables
from jpaged.memory.layout import PoolLayout

MOST_REQUESTS = 128
"""Requests that count as recent."""

STEP_OVERHEAD = 128
"""What a step costs beside its tokens (reading the weights), as a number of prefill tokens that take as long."""


@dataclass
class Recent:
    """A recent request.

    Attributes:
        digests: names of its prefixes, shortest first, one for each length that can hit.
        num_prompt: of those, how many its prompt had.
        shared: how many it had in common with an earlier recent request when it came.
        num_bytes: what it held at its end; 0 while it runs.
    """

    digests: list[bytes]
    num_prompt: int
    shared: int
    num_bytes: int = 0


@dataclass(frozen=True)
class Candidate:
    """A predicted prefix: `uses` recent requests began with its `tokens`, which take `num_bytes` to keep."""

    uses: int
    tokens: int
    num_bytes: int


class PredictedPrefixes:
    """Remembers what recent requests began with, and says what to protect and how much of it.

    Args:
        layout, allocator: of the pool.

    Attributes:
        limit_bytes: size of the protected pool, see `protected_bytes`.
    """

    def __init__(self, layout: PoolLayout, allocator: BlockAllocator) -> None:
        self.limit_bytes = 0
        self._layout = layout
        self._allocator = allocator
        self._recent: OrderedDict[int, Recent] = OrderedDict()
        self._uses: Counter[bytes] = Counter()
        self._num_digests = 0
        groups = [group.spec for group in layout.groups]
        self._step = layout.prefix_step
        self._chain = max(spec.block_size for spec in groups if spec.policy.names_tokens)

    def arrived(self, sequence: BlockTables) -> None:
        """A sequence whose prompt is in its hash chains is about to run: predict its prefix."""
        request_id = sequence.request.request_id
        self._forget(request_id)
        digests = self._digests(sequence)
        # Whoever has a prefix has all shorter ones: bisect for the first that nobody has.
        shared = bisect_left(digests, True, key=lambda digest: self._uses[digest] == 0)
        self._remember(request_id, Recent(digests, len(digests), shared))
        fitting = bisect_left(range(1, shared + 1), True, key=lambda n: self._num_bytes(sequence, n) > self.limit_bytes)
        length = fitting * self._step
        sequence.predicted = [
            policy.active_blocks(length, size) if fitting else () for policy, size in sequence.request.groups
        ]

    def left(self, sequence: BlockTables) -> None:
        """A sequence has given up its blocks: what it generated may be the next request's prompt."""
        entry = self._recent.get(sequence.request.request_id)
        if entry is None:
            return
        digests = self._digests(sequence)
        if len(digests) > len(entry.digests):
            new = digests[len(entry.digests) :]
            self._uses.update(new)
            self._num_digests += len(new)
            entry.digests = digests
        entry.num_bytes = self._num_bytes(sequence, max(1, len(digests)))
        self.limit_bytes = self._choose_limit(sequence)

    def overflow(self) -> tuple[int, int, int] | None:
        """(group, block, `Time.minus_end`) of the least recently needed protected block, while there are more bytes of
        them than the limit."""
        groups = list(zip(self._allocator.groups, self._layout.groups, strict=True))
        if sum(len(state.protected) * group.block_bytes for state, group in groups) <= self.limit_bytes:
            return None
        firsts = ((g, *next(iter(state.protected.items()))) for g, (state, _) in enumerate(groups) if state.protected)
        g, block, time = min(firsts, key=lambda first: first[2])
        return g, block, time.minus_end

    def _choose_limit(self, sequence: BlockTables) -> int:
        done = [entry for entry in self._recent.values() if entry.num_bytes]
        output = sum(len(entry.digests) - entry.num_prompt for entry in done) * self._step / len(done)
        by_prefix = Counter(entry.digests[entry.shared - 1] for entry in self._recent.values() if entry.shared)
        lengths = {e.digests[e.shared - 1]: e.shared for e in self._recent.values() if e.shared}
        candidates = (
            Candidate(uses, lengths[digest] * self._step, self._num_bytes(sequence, lengths[digest]))
            for digest, uses in by_prefix.items()
        )
        return protected_bytes(
            candidates,
            num_requests=len(self._recent),
            pool_bytes=self._layout.pool_bytes,
            request_bytes=sum(entry.num_bytes for entry in done) / len(done),
            output_tokens=max(output, self._step / 2),
        )

    def _num_bytes(self, sequence: BlockTables, steps: int) -> int:
        """Bytes that are active at the end of a prefix of `steps` steps."""
        total = 0
        for (policy, size), group in zip(sequence.request.groups, self._layout.groups, strict=True):
            total += sum(len(run) for run in policy.active_blocks(steps * self._step, size)) * group.block_bytes
        return total

    def _digests(self, sequence: BlockTables) -> list[bytes]:
        every = self._step // self._chain
        return [link.digest for link in sequence.chains[self._chain].links[every - 1 :: every]]

    def _remember(self, request_id: int, entry: Recent) -> None:
        self._recent[request_id] = entry
        self._uses.update(entry.digests)
        self._num_digests += len(entry.digests)
        # A prefix that could fill the pool twice over since it was asked for is not recent.
        most = 2 * max(group.num_blocks for group in self._layout.groups)
        while len(self._recent) > MOST_REQUESTS or (self._num_digests > most and len(self._recent) > 1):
            self._forget(next(iter(self._recent)))

    def _forget(self, request_id: int) -> None:
        entry = self._recent.pop(request_id, None)
        if entry is not None:
            self._num_digests -= len(entry.digests)
            for digest in entry.digests:
                self._uses[digest] -= 1
                if not self._uses[digest]:
                    del self._uses[digest]


def protected_bytes(
    candidates: Iterable[Candidate],
    *,
    num_requests: int,
    pool_bytes: int,
    request_bytes: float,
    output_tokens: float,
    step_overhead: float = STEP_OVERHEAD,
) -> int:
    """The size of the protected pool that makes a mean request cheapest, in units of one prefill token's time.

    With P of M bytes protected, ``N = (M - P) / request_bytes`` requests run at once and share every step's
    overhead. A request of `output_tokens` steps then costs ``output_tokens * step_overhead / N``, less the prefill
    that protected prefixes save it: ``sum(uses * tokens) / num_requests``. Prefixes are taken in the order of
    tokens saved a byte, for as long as what one saves exceeds what the smaller N costs.

    Args:
        candidates: prefixes that could be protected.
        num_requests: recent requests, those that share nothing included.
        pool_bytes: of the whole pool.
        request_bytes: what a request holds.
        output_tokens: what it generates.
        step_overhead: see `STEP_OVERHEAD`.
    """

    def waiting(protected: int) -> float:
        return output_tokens * step_overhead * request_bytes / (pool_bytes - protected)

    size = 0
    for prefix in sorted(candidates, key=lambda c: c.uses * c.tokens / c.num_bytes, reverse=True):
        larger = size + prefix.num_bytes
        if larger + request_bytes > pool_bytes:
            continue
        if prefix.uses * prefix.tokens / num_requests <= waiting(larger) - waiting(size):
            break
        size = larger
    return size
