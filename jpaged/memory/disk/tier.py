"""The third tier: cached blocks that the pool loses go to disk, and are read ahead for requests that begin with them.

Nothing on disk is needed: what is not found, cannot be read or turns out damaged is computed again. A block goes to disk
when the pool evicts it, under its name in the hash chain, so that whatever keeps prefixes apart (salts, adapters, images)
keeps them apart here. It stays there when it is read, and is not written again when the pool loses it once more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jpaged.memory.disk.asked import Asked
from jpaged.memory.disk.break_even import BreakEven
from jpaged.memory.disk.index import DiskIndex, StoredBlock
from jpaged.memory.disk.moves import BlockStore, DiskFill, DiskRead, DiskWrite
from jpaged.memory.hash_chain import HashChain, Link
from jpaged.memory.layout import PoolLayout
from jpaged.memory.policies import Policy
from jpaged.memory.prefix_cache import PrefixCache, longest_prefix
from jpaged.memory.spans import TokenSpan

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

BACKLOG_BYTES = 512 << 20
"""Most bytes that wait in host memory to be written; a block that is evicted beyond them is lost as without a disk."""

STAGED_PART = 4
"""The pool over the bytes that are read ahead for requests that wait."""

LONGEST_WAIT = 5.0
"""Seconds, or twice the time of computing the tokens where that is more, after which a read is given up."""


class Prefix(NamedTuple):
    """The beginning of a request, as it is looked up.

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


@dataclass(frozen=True)
class DiskStats:
    """What the disk tier has and did.

    Attributes:
        limit_bytes, used_bytes: size of the file, and of its part that is in use.
        num_blocks: blocks that can be found.
        hits: tokens that were read from disk instead of being computed.
        read_bytes, written_bytes: bytes that were read, and that were given to be written.
        failures: blocks that were damaged or not there when they were read, and reads that took too long.
        skipped: blocks that were evicted faster than they could be written.
        break_even: fewest tokens of a prefix that are read rather than computed; None = none, or not known yet.
        read_rate: bytes a second that reads bring.
        seconds_per_token: time in which a token of a prompt is computed; None = not known yet.
        is_open: whether the disk works; False = everything is computed, as without it.
    """

    limit_bytes: int
    used_bytes: int
    num_blocks: int
    hits: int
    read_bytes: int
    written_bytes: int
    failures: int
    skipped: int
    break_even: int | None
    read_rate: float
    seconds_per_token: float | None
    is_open: bool


class DiskTier:
    """Says which evicted blocks are written, what is read for whom, and which blocks of the pool are filled with it.

    Args:
        layout: how the pool is cut.
        store: moves the bytes.
        num_bytes: size of the file.
        shards: parts that a block has, one on each device.
        break_even: says what is worth reading.

    Attributes:
        version: changes when the pool loses a block, or one can be read that could not before.
    """

    def __init__(
        self, layout: PoolLayout, store: BlockStore, *, num_bytes: int, shards: int, break_even: BreakEven
    ) -> None:
        self.break_even = break_even
        self.version = 0
        self._layout = layout
        self._store = store
        page_bytes = layout.page_bytes * shards
        block_bytes = [group.block_bytes * shards for group in layout.groups]
        self._index = DiskIndex(block_bytes, page_bytes, num_bytes // page_bytes)
        self._most_staged = layout.pool_bytes * shards // STAGED_PART
        self._epoch = 0
        self._hits = self._read_bytes = self._written_bytes = self._failures = self._skipped = 0
        self._begin()

    def _begin(self) -> None:
        self._writes: list[DiskWrite] = []
        self._unsent: set[tuple[int, bytes]] = set()
        self._unsent_bytes = 0
        self._fills: dict[tuple[int, int], DiskFill] = {}
        self._incoming: set[tuple[int, int]] = set()
        self._asked: OrderedDict[int, Asked] = OrderedDict()
        self._num_staged = 0
        self._late: DiskRead | None = None
        self._is_planning = False

    def clear(self) -> None:
        """Forget everything: what is on disk, on its way there, and read for requests that wait."""
        for asked in self._asked.values():
            asked.cancel()
        self._epoch += 1  # what is still being written then has names that nobody asks for
        self._index.clear()
        self._store.forget_all()
        self._begin()

    @property
    def is_open(self) -> bool:
        """Tell whether the disk works."""
        return self._store.is_open

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn from a step with prompts; the first time that it can be said, tell what is worth reading."""
        even = self.break_even
        was_known = even.seconds_per_token is not None
        even.computed(tokens, seconds)
        if not was_known and even.seconds_per_token is not None and even.min_tokens is None:
            least = even.tokens(self._layout.prefix_step, self._prefix_bytes)
            logger.info(
                "a prompt's token is computed in %.3g ms, disk brings %.0f MB/s: %s",
                1e3 * even.seconds_per_token,
                even.read_rate / 1e6,
                "nothing is read" if least is None else f"prefixes are read from {least} tokens on",
            )

    # What the pool loses.

    def begin_step(self) -> None:
        """Note that a step is being planned: what the pool evicts from here to `take_moves` may be written, as the
        device can copy it before the step changes it."""
        self._is_planning = True

    def lost(self, g: int, block: int, link: Link) -> None:
        """Note that a block of the pool loses its content."""
        self.version += 1
        if self._fills.pop((g, block), None) is not None:
            return  # it is on disk still
        if not self._is_planning or not self.is_open or (g, block) in self._incoming:
            return
        stored = self._index.find(g, link)
        if stored is not None:
            self._index.touch(stored)
            return
        waiting = self._store.num_queued_bytes + self._unsent_bytes
        if waiting + self._index.block_bytes[g] > BACKLOG_BYTES:
            self._skipped += 1
            return
        stored = self._index.put(g, link)
        if stored is not None:
            self._writes.append(DiskWrite(g, block, stored.place, self._name(stored)))
            self._unsent.add((g, link.digest))
            self._unsent_bytes += stored.num_bytes
            self._written_bytes += stored.num_bytes

    def comes_in(self, g: int, block: int) -> None:
        """Note that a block gets its content in the step that is being planned, from host memory: nobody could copy it
        out before."""
        self._incoming.add((g, block))

    def take_moves(self) -> tuple[list[DiskWrite], list[DiskFill]]:
        """Return what the device is to do before the step: copy these blocks out, then fill those."""
        writes, fills = self._writes, list(self._fills.values())
        self.version += bool(writes)  # from now on they can be read
        self._writes, self._fills = [], {}
        self._incoming.clear()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._is_planning = False
        return writes, fills

    @property
    def has_fills(self) -> bool:
        """Tell whether a block is to be filled in the step that is being planned: until then the pool does not hold
        what its table says."""
        return bool(self._fills)

    # What requests that wait ask for.

    def look(self, request_id: int, prefix: Prefix, cache: PrefixCache, now: float, *, is_next: bool) -> None:
        """Begin to read what a request begins with, as far as the pool does not have it and it is worth reading.

        Args:
            now: time in seconds, on the clock of `waits_for`.
            is_next: whether no other request comes into the batch before it, so that what was read for others may go.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            if not self._index or not self.is_open:
                return
            asked = self._asked[request_id] = Asked(prefix.chains)
        self._take(asked)
        if asked.read is not None or asked.has_given_up or asked.seen == self.version or not self.is_open:
            return
        if self._late is not None and not self._late.is_done:
            return  # the disk hangs, and nobody else should wait for it
        tokens, blocks = self._missing(asked, prefix, cache)
        num_bytes = sum(block.num_bytes for block in blocks)
        if not blocks or not self.break_even.is_worth(tokens, num_bytes):
            asked.seen = self.version
            return
        if not self._has_room(asked, num_bytes, is_next=is_next):
            return
        asked.seen = self.version
        for block in blocks:
            self._index.touch(block)
        asked.read = DiskRead(blocks, [self._name(block) for block in blocks])
        asked.deadline = now + max(LONGEST_WAIT, 2 * tokens * (self.break_even.seconds_per_token or 0))
        asked.num_bytes += num_bytes
        self._num_staged += num_bytes
        self._store.read(asked.read)

    def waits_for(self, request_id: int, now: float) -> DiskRead | None:
        """Return what is still being read for a request; None where nothing is, or it takes too long."""
        asked = self._asked.get(request_id)
        if asked is None:
            return None
        self._take(asked)
        if asked.read is not None and now > asked.deadline:
            logger.warning("%d bytes were not read from disk in time: they are computed", asked.read.num_bytes)
            self._late = asked.read
            asked.cancel()
            asked.has_given_up = True
            self._failures += 1
        return asked.read

    def staged(self, request_id: int) -> Mapping[tuple[int, bytes], np.ndarray]:
        """Return the bytes of the blocks that were read for a request, by group and digest."""
        asked = self._asked.get(request_id)
        return {} if asked is None else asked.contents

    def let_go(self, request_id: int) -> None:
        """Drop what was or is being read for a request."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.cancel()
            self._num_staged -= asked.num_bytes

    def fill(self, fills: Sequence[DiskFill], tokens: int) -> None:
        """Note that blocks of the pool are filled in the step that is being planned, instead of computing `tokens`."""
        self._fills.update(((fill.group, fill.block), fill) for fill in fills)
        self._hits += tokens
        self._read_bytes += sum(len(fill.content) for fill in fills)

    # How it goes.

    def stats(self) -> DiskStats:
        """Return what the tier has and did."""
        even = self.break_even
        return DiskStats(
            limit_bytes=self._index.num_pages * self._index.page_bytes,
            used_bytes=self._index.num_bytes,
            num_blocks=len(self._index),
            hits=self._hits,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            failures=self._failures,
            skipped=self._skipped,
            break_even=even.tokens(self._layout.prefix_step, self._prefix_bytes),
            read_rate=even.read_rate,
            seconds_per_token=even.seconds_per_token,
            is_open=self.is_open,
        )

    def check(self) -> None:
        """Raise AssertionError where a count is wrong; for tests."""
        self._index.check()
        assert self._num_staged == sum(asked.num_bytes for asked in self._asked.values()), "bytes read ahead"
        assert not (self._writes or self._fills or self._is_planning), "moves were not taken"

    # Steps of the above.

    def _name(self, stored: StoredBlock) -> bytes:
        return self._epoch.to_bytes(8, "little") + stored.group.to_bytes(2, "little") + stored.digest

    def _take(self, asked: Asked) -> None:
        """Take over what has been read, if the read has ended."""
        read = asked.read
        if read is None or not read.is_done:
            return
        asked.read, asked.seen = None, -1
        asked.contents.update(read.contents)
        self.break_even.read(sum(map(len, read.contents.values())), read.seconds)
        for block in read.damaged:
            self._index.forget(block)
        if read.damaged:
            self._failures += len(read.damaged)
            logger.warning("%d blocks on disk are damaged: their tokens are computed", len(read.damaged))

    def _missing(self, asked: Asked, prefix: Prefix, cache: PrefixCache) -> tuple[int, list[StoredBlock]]:
        """Return how many tokens more would be found if some blocks on disk were read, and these blocks."""
        here: list[list[bool]] = []
        there: list[list[StoredBlock | None]] = []
        for g, (policy, size) in enumerate(prefix.groups):
            wanted = policy.full_blocks(prefix.limit, 0, size)
            links = cache.links(asked.chains, g, prefix.tokens, wanted)
            here.append([cache.find(g, link) is not None or (g, link.digest) in asked.contents for link in links])
            there.append([self._readable(g, link) for link in links])
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

    def _readable(self, g: int, link: Link) -> StoredBlock | None:
        """Return a block on disk, or on its way there."""
        return None if (g, link.digest) in self._unsent else self._index.find(g, link)

    def _has_room(self, asked: Asked, num_bytes: int, *, is_next: bool) -> bool:
        """Tell whether so many bytes more may be read ahead; the next request takes them from the last ones."""
        while self._num_staged + num_bytes > self._most_staged and self._num_staged > asked.num_bytes:
            if not is_next:
                return False
            last = next(key for key, other in reversed(self._asked.items()) if other is not asked and other.num_bytes)
            self.let_go(last)
        return is_next or self._num_staged + num_bytes <= self._most_staged

    def _prefix_bytes(self, tokens: int) -> int:
        """Return the size of the blocks that a prefix of so many tokens needs."""
        total = 0
        for group, size in zip(self._layout.groups, self._index.block_bytes, strict=True):
            policy = group.spec.policy.for_prefix(tokens, 0)
            total += size * sum(len(run) for run in policy.active_blocks(tokens, group.spec.block_size))
        return total
