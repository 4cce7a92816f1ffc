"""Chooses cached blocks that are worth more than room for one more request (Jenga, SOSP'25: predicted prefixes).

A prefix of several recent requests will probably be used again, while their other tokens will hardly be. So
of a request's blocks those that are active at the end of its predicted prefix, the longest prefix it shares with a
recent request, are protected once no sequence owns them: new requests wait rather than evict them. (Running requests do
evict them before one is preempted, and so does a new request when none runs.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.block_tables import BlockTables
from jpaged.memory.layout import PoolLayout
from jpaged.memory.recent_prefixes import MOST_REQUESTS, RecentPrefixes

FIRST_PART = 4
"""The pool over the bound before anything is learned: little is lost until then where plain LRU is better."""


class LostPrefixes:
    """Remembers the names of evicted blocks, as many as the pool has, and learns a bound from them (ARC, FAST'03).

    Args:
        layout: how the pool is cut.
        recent: the prefixes of recent requests.

    Attributes:
        group: the layer group whose evicted blocks are noted: one that keeps every token, if any does.
        most_bytes: most bytes that may be protected.
        names: names of evicted blocks that no request needed since, the oldest first.
        often: names of blocks that were needed again, the oldest first.
    """

    def __init__(self, layout: PoolLayout, recent: RecentPrefixes) -> None:
        self.most_bytes = layout.pool_bytes // FIRST_PART
        self.names: OrderedDict[bytes, None] = OrderedDict()
        self.often: OrderedDict[bytes, None] = OrderedDict()
        self._recent = recent
        self._step = layout.prefix_step
        self._pool_bytes = layout.pool_bytes
        named = [g for g, group in enumerate(layout.groups) if group.spec.policy.names_tokens]
        self._step_bytes = sum(_step_bytes(layout, g) for g in named)
        self.group = max(named, key=lambda g: (layout.groups[g].spec.block_size == recent.chain_key, _kept(layout, g)))
        self._most_names = layout.groups[self.group].num_blocks

    def evicted(self, g: int, name: bytes) -> None:
        """Note that a block of group `g` lost its content."""
        if g != self.group:
            return
        self.names[name] = None
        self.names.move_to_end(name)
        if len(self.names) > self._most_names:
            self.names.popitem(last=False)

    def requested(self, request_id: int, cached: int) -> None:
        """Learn from a request in `RecentPrefixes` that found `cached` tokens of its shared prefix."""
        entry, often = self._recent.entries[request_id], self.often
        for place, name in enumerate(entry.digests[: entry.shared]):
            if place >= cached // self._step and name in self.names:
                del self.names[name]
                self._move(self._step_bytes if name in often else -self._step_bytes)
            often[name] = None
            often.move_to_end(name)
        while len(often) > 2 * self._most_names:
            often.popitem(last=False)

    def _move(self, num_bytes: int) -> None:
        self.most_bytes = min(self._pool_bytes, max(0, self.most_bytes + num_bytes))

    def data(self) -> list[Any]:
        """Return the state as plain data, for `load`."""
        return [self.most_bytes, list(self.names), list(self.often)]

    def load(self, most_bytes: int, names: Iterable[bytes], often: Iterable[bytes]) -> None:
        """Restore a saved state."""
        self.most_bytes = min(self._pool_bytes, most_bytes)
        self.names, self.often = OrderedDict.fromkeys(names), OrderedDict.fromkeys(often)

    def forget(self) -> None:
        """Forget the names of evicted blocks: all were dropped at once, which teaches nothing."""
        self.names.clear()


def _kept(layout: PoolLayout, g: int) -> int:
    """Return how many blocks of a group a sequence that fills it still needs."""
    spec, number = layout.groups[g].spec, layout.groups[g].num_blocks
    return sum(len(run) for run in spec.policy.active_blocks(spec.block_size * number, spec.block_size))


def _step_bytes(layout: PoolLayout, g: int) -> int:
    """Return the bytes of a group that are written for as many tokens as prefixes are multiples of."""
    spec = layout.groups[g].spec
    apart = spec.block_size * spec.policy.entries_apart(spec.block_size)
    return max(1, layout.prefix_step * layout.groups[g].block_bytes // apart)


STEP_OVERHEAD = 128
"""Fixed cost of a step (reading the weights), as a number of prefill tokens that take as long."""


@dataclass(frozen=True)
class Candidate:
    """A predicted prefix: `uses` recent requests began with its `tokens`, which take `num_bytes` to keep."""

    uses: int
    tokens: int
    num_bytes: int


class PredictedPrefixes:
    """Chooses the prefixes to protect, and the size of the protected pool.

    Args:
        layout: how the pool is cut.
        allocator: the state of the pool's blocks.
        recent: the prefixes of recent requests.

    Attributes:
        limit_bytes: size of the protected pool: see `protected_bytes`, and `LostPrefixes` for a bound.
        lost: the evicted prefixes, which bound the protected pool.
    """

    def __init__(self, layout: PoolLayout, allocator: BlockAllocator, recent: RecentPrefixes) -> None:
        self.limit_bytes = 0
        self._layout = layout
        self._pool_bytes = layout.pool_bytes
        self._allocator = allocator
        self._recent = recent
        self._step = layout.prefix_step
        self._ends = 0
        self.lost = LostPrefixes(layout, recent)

    def predict(self, sequence: BlockTables, shared: int) -> None:
        """Choose the blocks to protect of a sequence that is about to run, within its first `shared` tokens."""
        steps = range(1, shared // self._step + 1)
        fitting = bisect_left(steps, True, key=lambda n: self._num_bytes(sequence, n) > self.limit_bytes)
        length = sequence.request.prefix_to_come(fitting * self._step, self._step)
        sequence.predicted = [
            policy.active_blocks(length, size) if length else () for policy, size in sequence.request.groups
        ]

    def ended(self, sequence: BlockTables) -> None:
        """Note the size of a sequence that was freed, after `RecentPrefixes.ended`."""
        entry = self._recent.entries.get(sequence.request.request_id)
        num_bytes = 0 if entry is None else self._num_bytes(sequence, max(1, len(entry.digests)))
        if entry is not None and num_bytes != entry.num_bytes:  # equal: it was preempted and only tried to come back
            entry.num_bytes = num_bytes
            # Choosing looks at all entries: where there are many it is done the more seldom, so that an end costs the
            # same on the average however many run at once.
            self._ends += 1
            if self._ends % max(1, len(self._recent.entries) // MOST_REQUESTS) == 0:
                self.limit_bytes = self.choose_limit(sequence)

    def overflow(self) -> tuple[int, int, int] | None:
        """Return the least recently needed protected block as (group, block, `EvictionKey.negative_end`); None while
        the protected blocks take no more bytes than the limit."""
        groups = list(zip(self._allocator.groups, self._layout.groups, strict=True))
        if sum(len(state.protected) * group.block_bytes for state, group in groups) <= self.limit_bytes:
            return None
        firsts = ((g, *next(iter(state.protected.items()))) for g, (state, _) in enumerate(groups) if state.protected)
        g, block, time = min(firsts, key=lambda first: first[2])
        return g, block, time.negative_end

    def choose_limit(self, sequence: BlockTables) -> int:
        """Return the size of the protected pool that serves the recent requests best, in bytes."""
        done = [entry for entry in self._recent.entries.values() if entry.num_bytes]
        output = sum(len(entry.digests) - entry.num_prompt for entry in done) * self._step / len(done)
        by_prefix = Counter(entry.digests[entry.shared - 1] for entry in self._recent.entries.values() if entry.shared)
        lengths = {e.digests[e.shared - 1]: e.shared for e in self._recent.entries.values() if e.shared}
        candidates = (
            Candidate(uses, lengths[digest] * self._step, self._num_bytes(sequence, lengths[digest]))
            for digest, uses in by_prefix.items()
        )
        worth = protected_bytes(
            candidates,
            num_requests=len(self._recent.entries),
            pool_bytes=self._pool_bytes,
            request_bytes=sum(entry.num_bytes for entry in done) / len(done),
            output_tokens=max(output, self._step / 2),
        )
        return min(worth, self.lost.most_bytes)

    def _num_bytes(self, sequence: BlockTables, steps: int) -> int:
        """Return the bytes that are active at the end of a prefix of `steps` steps.

        One at least: of local attention nothing is active where a chunk ends.
        """
        total = 0
        for (policy, size), group in zip(sequence.request.groups, self._layout.groups, strict=True):
            total += sum(len(run) for run in policy.active_blocks(steps * self._step, size)) * group.block_bytes
        return max(1, total)


def protected_bytes(
    candidates: Iterable[Candidate],
    *,
    num_requests: int,
    pool_bytes: int,
    request_bytes: float,
    output_tokens: float,
    step_overhead: float = STEP_OVERHEAD,
) -> int:
    """Return the bytes of the protected pool that make a mean request cheapest, where costs count in one prefill
    token's time.

    With P of M bytes protected, ``N = (M - P) / request_bytes`` requests run at once and share every step's
    overhead. A request of `output_tokens` steps then costs ``output_tokens * step_overhead / N``, less the prefill
    that protected prefixes save it: ``sum(uses * tokens) / num_requests``. Prefixes are taken in the order of
    tokens saved a byte, for as long as what one saves exceeds what the smaller N costs.

    Args:
        candidates: prefixes that could be protected.
        num_requests: recent requests, those that share nothing included.
        pool_bytes: size of the whole pool.
        request_bytes: bytes that a mean request holds.
        output_tokens: tokens that it generates.
        step_overhead: fixed cost of a step, see `STEP_OVERHEAD`.
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
