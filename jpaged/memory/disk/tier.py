"""The third tier: cached blocks go to disk when the pool evicts them, and are read ahead for requests that need them.

No block on disk is needed: tokens of a block that is missing, unreadable or damaged are computed again. A block goes to
disk when the pool evicts it, under its name in the hash chain, so salts, adapters and images keep prefixes apart here
too. It stays on disk when it is read, and is not written again when the pool evicts it once more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.memory.disk.break_even import BreakEven
from jpaged.memory.disk.index import DiskIndex
from jpaged.memory.disk.prefetch import Prefetch
from jpaged.memory.disk.transfers import BlockStore, DiskFill, DiskWrite
from jpaged.memory.hash_chain import Link
from jpaged.memory.layout import PoolLayout


@dataclass(frozen=True)
class DiskStats:
    """Contents and counters of the disk tier.

    Attributes:
        limit_bytes, used_bytes: size of the file, and of its part that is in use.
        num_blocks: blocks that can be found.
        hits: tokens that were read from disk instead of being computed.
        read_bytes, written_bytes: bytes that came back into the pool, and that were given to be written.
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


logger = logging.getLogger(__name__)

BACKLOG_BYTES = 512 << 20
"""Most bytes that wait in host memory to be written; a block that is evicted beyond them is lost as without a disk."""

STAGED_PART = 4
"""The pool over the bytes that are read ahead for requests that wait."""


class DiskTier:
    """Decides which evicted blocks are written to disk, which are read ahead, and which blocks of the pool they fill.

    Args:
        layout: how the pool is cut.
        store: moves the bytes.
        num_bytes: size of the file.
        shards: parts that a block has, one on each device.
        break_even: weighs reading against computing.

    Attributes:
        prefetch: the reads for requests that wait.
    """

    def __init__(
        self, layout: PoolLayout, store: BlockStore, *, num_bytes: int, shards: int, break_even: BreakEven
    ) -> None:
        page_bytes = layout.page_bytes * shards
        index = DiskIndex([group.block_bytes * shards for group in layout.groups], page_bytes, num_bytes // page_bytes)
        self.prefetch = Prefetch(index, store, break_even, layout.pool_bytes * shards // STAGED_PART)
        self._index = index
        self._store = store
        self._break_even = break_even
        self._layout = layout
        self._hits = self._read_bytes = self._written_bytes = self._skipped = 0
        self._begin()

    def _begin(self) -> None:
        self._writes: list[DiskWrite] = []
        self._unsent_bytes = 0
        self._fills: dict[tuple[int, int], DiskFill] = {}
        self._is_planning = False

    @property
    def is_open(self) -> bool:
        """Tell whether the disk works; without it all tokens are computed."""
        return self._store.is_open

    def clear(self) -> None:
        """Forget all blocks: on disk, on their way there, and read for requests that wait."""
        self._index.clear()
        self._store.forget_all()
        self.prefetch.clear()
        self._begin()

    # Blocks that the pool evicts.

    def begin_step(self) -> None:
        """Note that a step is being planned: blocks that the pool evicts until `take_writes` may be written, as the
        device copies them before the step changes them."""
        self._is_planning = True

    def evicted(self, g: int, block: int, link: Link) -> None:
        """Note that the pool evicts a block, whose content is there, and write it if there is room."""
        self.prefetch.version += 1
        if not self._is_planning or not self.is_open:
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
            self._writes.append(DiskWrite(g, block, stored.place, self._index.name(stored)))
            self._unsent_bytes += stored.num_bytes
            self._written_bytes += stored.num_bytes

    def unfill(self, g: int, block: int) -> None:
        """Note that the pool evicts a block that the step in planning was to fill; its content may not be there yet."""
        self.prefetch.version += 1
        self._fills.pop((g, block), None)

    def fill(self, fills: Sequence[DiskFill], tokens: int) -> None:
        """Note that blocks of the pool are filled in the step that is being planned, instead of computing `tokens`."""
        self._fills.update(((fill.group, fill.block), fill) for fill in fills)
        self._hits += tokens
        self._read_bytes += sum(len(fill.content) for fill in fills)

    def take_writes(self) -> list[DiskWrite]:
        """Return the blocks that the device copies out before anything else of the step, whose planning ends."""
        self._is_planning = False
        return list(self._writes)

    def take_fills(self) -> list[DiskFill]:
        """Return the blocks that the device fills before the step's block copies and chunks."""
        return list(self._fills.values())

    def dispatched(self) -> None:
        """Note that the device has the step: its writes can be read from now on."""
        self.prefetch.version += bool(self._writes)
        self._index.sent()
        self._begin()

    # Measurements.

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn from a step with prompts. Log the break-even once, as soon as it is known."""
        even = self._break_even
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

    def stats(self) -> DiskStats:
        """Return contents and counters."""
        even = self._break_even
        return DiskStats(
            limit_bytes=self._index.num_pages * self._index.page_bytes,
            used_bytes=self._index.num_bytes,
            num_blocks=len(self._index),
            hits=self._hits,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            failures=self.prefetch.failures,
            skipped=self._skipped,
            break_even=even.tokens(self._layout.prefix_step, self._prefix_bytes),
            read_rate=even.read_rate,
            seconds_per_token=even.seconds_per_token,
            is_open=self.is_open,
        )

    def check(self) -> None:
        """Raise AssertionError where a count is wrong; for tests."""
        self._index.check()
        self.prefetch.check()
        assert not (self._writes or self._fills or self._is_planning), "a step was planned and not dispatched"

    def _prefix_bytes(self, tokens: int) -> int:
        """Return the size of the blocks that a prefix of so many tokens needs."""
        total = 0
        for group, size in zip(self._layout.groups, self._index.block_bytes, strict=True):
            policy = group.spec.policy.for_prefix(tokens, 0)
            total += size * sum(len(run) for run in policy.active_blocks(tokens, group.spec.block_size))
        return total
