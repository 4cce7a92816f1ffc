"""One tier below the pool: what lies there, under which names, and how fast it comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from jpaged.memory.hash_chain import Link
from jpaged.memory.layout import PoolLayout
from jpaged.memory.tiers.break_even import BreakEven
from jpaged.memory.tiers.index import StoredBlock, TierIndex
from jpaged.memory.tiers.transfers import BlockStore

BACKLOG_BYTES = 512 << 20
"""Most bytes that wait to be written: an evicted block beyond them is lost, a full one stays in the pool and waits."""

TierName: TypeAlias = Literal["ram", "disk"]


@dataclass(frozen=True)
class TierStats:
    """Contents and counters of a tier.

    Attributes:
        limit_bytes, used_bytes: size of the tier, and of its part that is in use.
        num_blocks: blocks that can be found.
        hits: tokens that were read from it instead of being computed.
        read_bytes, written_bytes: bytes that came back into the pool, and that were given to be written.
        failures: blocks that were damaged or not there when they were read, and reads that took too long.
        skipped: blocks that came faster than they could be written.
        break_even: fewest tokens of a prefix that are read rather than computed; None = none, or not known yet.
        read_rate: bytes a second that reads bring to the host.
        seconds_per_token: time in which a token of a prompt is computed; None = not known yet.
        is_open: whether the tier works; False = everything is computed, as without it.
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


@dataclass
class TierCounters:
    """Counts what a tier did, see `TierStats`."""

    hits: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    failures: int = 0
    skipped: int = 0


@dataclass(eq=False)
class Tier:
    """The blocks of one tier.

    Args:
        layout: how the pool is cut.
        store: moves the bytes.
        num_bytes: size of the store.
        shards: parts that a block has, one on each device.
        break_even: weighs reading against computing.
        at_fill: whether blocks are written when they are full; else when the pool evicts them.
        model: stands for the weights in the names of blocks.
        only_reads: whether another process writes the blocks.
        salt_bytes: most bytes of one cache salt; None = no limit.

    Attributes:
        index: the blocks that can be found.
    """

    name: TierName
    layout: PoolLayout
    store: BlockStore
    num_bytes: int
    shards: int
    break_even: BreakEven
    at_fill: bool = False
    model: bytes = b""
    only_reads: bool = False
    salt_bytes: int | None = None
    counters: TierCounters = field(default_factory=TierCounters)

    def __post_init__(self) -> None:
        sizes = [group.block_bytes * self.shards for group in self.layout.groups]
        page_bytes = self.layout.page_bytes * self.shards
        self.index = TierIndex(sizes, page_bytes, self.num_bytes // page_bytes, salt_bytes=self.salt_bytes)
        self._most_pages = self.index.num_pages
        self._unsent_bytes = 0
        self._refreshed = 0.0

    @property
    def is_open(self) -> bool:
        """Tell whether the store works; without it all tokens are computed."""
        return self.store.is_open

    def block_name(self, stored: StoredBlock) -> bytes:
        """Return the name under which a block is written and read: that of the model, its layer group and its
        content."""
        return self.model + stored.group.to_bytes(2, "little") + stored.digest

    def keeps_up(self, g: int) -> bool:
        """Tell whether a block more may wait to be written."""
        waiting = self.store.num_queued_bytes + self._unsent_bytes
        return not waiting or waiting + self.index.block_bytes[g] <= BACKLOG_BYTES

    @property
    def takes_blocks(self) -> bool:
        """Tell whether blocks may be put into it by this process."""
        return self.is_open and not self.only_reads

    def put(self, g: int, link: Link, level: int = 0, until: float = math.inf) -> StoredBlock | None:
        """Give a block of the pool a place; None where it has one, or none is to be had. Call it only where the tier
        `takes_blocks` and `keeps_up`.

        Args:
            level, until: see `TierIndex.put`.
        """
        if self._touch(g, link):
            return None
        stored = self.index.put(g, link, level, until)
        if stored is not None:
            self._unsent_bytes += stored.num_bytes
        return stored

    def skip(self, g: int, link: Link) -> None:
        """Note that the pool loses a block for which the tier does not keep up."""
        self.counters.skipped += not self._touch(g, link)

    def _touch(self, g: int, link: Link) -> bool:
        """Note that a content is needed now; return whether the tier has it."""
        stored = self.index.find(g, link)
        if stored is not None:
            self.index.touch(stored)
        return stored is not None

    def sent(self) -> None:
        """Note that all blocks with a place are there, or on their way."""
        self.counters.written_bytes += self._unsent_bytes
        self._unsent_bytes = 0
        self.index.sent()

    def give_up_step(self) -> None:
        """Forget the blocks that a step was to send which is given up."""
        self._unsent_bytes = 0
        self.index.forget_unsent()

    def clear(self) -> None:
        """Forget all blocks, in the tier and on their way there."""
        self._unsent_bytes = 0
        self.index.clear()
        self.store.forget_all()

    def leave(self, num_bytes: int) -> None:
        """Leave so many bytes of the tier's bound to others: blocks are dropped for them."""
        page_bytes = self.index.page_bytes
        pages = self._most_pages - -(-num_bytes // page_bytes)
        if pages != self.index.num_pages:
            for number in self.index.limit(pages):
                self.store.give_back(number * page_bytes, page_bytes)

    def refresh(self, now: float) -> None:
        """Take in what another process wrote, at most once a second; write from then on if that one has ended."""
        if self.only_reads and self.is_open and now >= self._refreshed + 1.0:
            self._refreshed = now
            anew, blocks = self.store.fresh()
            if anew:
                self.index.clear()
            self.index.load(blocks)
            self.only_reads = not self.store.writes

    def renew(self, model: bytes) -> None:
        """Forget all blocks, because the weights change: other names begin, which no other process has."""
        self.clear()
        self.model = model

    def prefix_bytes(self, tokens: int) -> int:
        """Return the size of the blocks that a prefix of so many tokens needs."""
        total = 0
        for group, size in zip(self.layout.groups, self.index.block_bytes, strict=True):
            policy = group.spec.policy.for_prefix(tokens, 0)
            total += size * sum(len(run) for run in policy.active_blocks(tokens, group.spec.block_size))
        return total

    def least_tokens(self) -> int | None:
        """Return the shortest prefix worth reading; None = there is none, or nothing is known yet."""
        return self.break_even.tokens(self.layout.prefix_step, self.prefix_bytes)

    def stats(self) -> TierStats:
        """Return contents and counters."""
        counters, index = self.counters, self.index
        return TierStats(
            limit_bytes=self._most_pages * index.page_bytes,
            used_bytes=index.num_bytes,
            num_blocks=len(index),
            hits=counters.hits,
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
            failures=counters.failures,
            skipped=counters.skipped,
            break_even=self.least_tokens(),
            read_rate=self.break_even.read_rate,
            seconds_per_token=self.break_even.seconds_per_token,
            is_open=self.is_open,
        )
