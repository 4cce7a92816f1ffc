"""The tiers below the pool, in the order in which blocks are looked for: host memory, then disk.

No block in a tier is needed: tokens of a block that is missing, unreadable or damaged are computed again. A block goes
to a tier under its name in the hash chain, so salts, adapters and images keep prefixes apart there too. It stays there
when it is read, and is not written again. A tier gets blocks when they are full: the pool still has them then, and no
eviction waits for a copy. Where a tier cannot keep up they wait in the pool, and are written when it evicts them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from jpaged.memory.hash_chain import Link
from jpaged.memory.retention import Retention
from jpaged.memory.tiers.host_memory import HostMemory
from jpaged.memory.tiers.index import StoredBlock
from jpaged.memory.tiers.prefetch import Prefetch
from jpaged.memory.tiers.tier import Tier, TierName, TierStats
from jpaged.memory.tiers.transfers import TierFill, TierWrite

logger = logging.getLogger(__name__)

STAGED_PART = 4
"""The pool over the bytes that are read ahead for requests that wait."""


class Tiers:
    """Decides which blocks are written to which tier, which are read ahead, and which blocks of the pool they fill.

    Args:
        each: the first is asked first; at least one.
        host: the bound on host memory that the RAM's blocks share with others; None = no other takes any.

    Attributes:
        prefetch: the reads for requests that wait.
    """

    def __init__(self, each: Sequence[Tier], host: HostMemory | None = None) -> None:
        self.each = each
        self.host = host or HostMemory()
        layout, shards = each[0].layout, each[0].shards
        self.prefetch = Prefetch(each, layout.pool_bytes * shards // STAGED_PART)
        self._forget_full()
        self._link_of: Callable[[int, int], Link | None] = lambda g, block: None
        self._retention: Retention | None = None
        self._begin()

    def _forget_full(self) -> None:
        """Forget the full blocks that tiers, by number, have not yet got."""
        self._full: dict[int, dict[tuple[int, int], tuple[Link, int]]]  # contents with their levels
        self._full = {number: {} for number, tier in enumerate(self.each) if tier.at_fill}

    def _begin(self) -> None:
        self._writes: list[tuple[TierWrite, StoredBlock]] = []
        self._fills: dict[tuple[int, int], tuple[TierFill, Link]] = {}
        self._coming: dict[tuple[int, int], tuple[Link, int]] = {}
        self._is_planning = False

    @property
    def is_open(self) -> bool:
        """Tell whether some tier works; without any all tokens are computed."""
        return any(tier.is_open for tier in self.each)

    def clear(self) -> None:
        """Forget all blocks: in the tiers, on their way there, and read for requests that wait."""
        for tier in self.each:
            tier.clear()
        self.prefetch.clear()
        self._forget_full()
        self._begin()

    def renew(self, model: bytes) -> None:
        """Begin other names, because the weights change: those of no other process, whose weights may be others."""
        for tier in self.each:
            tier.renew(model)

    def begin_pool(self, link_of: Callable[[int, int], Link | None], retention: Retention | None = None) -> None:
        """Begin with an empty pool; forget what was to come from the one before, and what was read for requests.

        What the tiers have stays: a block was named only after the step that fills it was dispatched, and its copy
        fails with that step.

        Args:
            link_of: returns the known content of a group's block.
            retention: the priorities that requests gave to contents; None = there are none.
        """
        self._link_of, self._retention = link_of, retention
        self._forget_full()
        for tier in self.each:
            tier.give_up_step()
        self.prefetch.clear()
        self.leave_swapped(0)
        self._begin()

    # Blocks that the pool fills and evicts.

    def begin_step(self) -> None:
        """Note that a step is being planned: blocks that the pool evicts until `take_writes` may be written, as the
        device copies them before the step changes them."""
        self._leave_ram()  # any thread may have read adapters since
        if self._retention is not None:
            for tier in self.each:
                tier.index.end_levels(self._retention.now())
        self._is_planning = True

    def filled(self, g: int, block: int, link: Link, is_there: bool, level: int = 0) -> None:
        """Note that the pool knows a block's content: a later step copies it.

        Args:
            is_there: whether a dispatched step brings the content; else the one in planning does.
            level: its level of priority where no request asks for another.
        """
        if self._full:
            for full in self._full.values() if is_there else (self._coming,):
                full[g, block] = link, level

    def evicted(self, g: int, block: int, link: Link) -> None:
        """Note that the pool evicts a block, whose content is there, and write it if there is room."""
        self.prefetch.changes.add(link.digest)
        for number, tier in enumerate(self.each):
            waits = self._full[number].pop((g, block), None) if tier.at_fill else (link, 0)
            if waits is not None and self._is_planning and tier.takes_blocks:
                if tier.keeps_up(g):
                    self._write(number, tier, g, block, *waits)
                else:
                    tier.skip(g, link)

    def unfill(self, g: int, block: int, link: Link) -> None:
        """Note that the pool evicts a block that the step in planning was to fill; its content may not be there yet."""
        self.prefetch.changes.add(link.digest)
        self._fills.pop((g, block), None)
        self._coming.pop((g, block), None)

    def fill(self, fills: Sequence[tuple[TierFill, Link]], tokens: Mapping[TierName, int]) -> None:
        """Note that blocks of the pool are filled in the step that is being planned, instead of computing tokens.

        Args:
            fills: the blocks, and the names of their contents.
            tokens: how many are found in each tier that the tiers before lack.
        """
        for fill, link in fills:
            self._fills[fill.group, fill.block] = fill, link
            self.each[fill.tier].counters.read_bytes += len(fill.content)
        for tier in self.each:
            tier.counters.hits += tokens.get(tier.name, 0)

    def take_writes(self) -> list[TierWrite]:
        """Return the blocks that the device copies out before anything else of the step, whose planning ends."""
        self._is_planning = False
        if not self._writes and not any(self._full.values()):
            return []
        for number, full in self._full.items():
            tier, done = self.each[number], 0
            if not tier.takes_blocks:
                self._full[number] = {}
                continue
            for (g, block), (link, level) in full.items():
                if self._link_of(g, block) is link:  # else it was overwritten
                    if not tier.keeps_up(g):
                        break
                    self._write(number, tier, g, block, link, level)
                done += 1
            self._full[number] = dict(islice(full.items(), done, None)) if done < len(full) else {}
        # A page may have been given to others since, and then back: two writes to one place could come in any order.
        return [write for write, stored in self._writes if self.each[write.tier].index.holds(stored)]

    def _write(self, number: int, tier: Tier, g: int, block: int, link: Link, level: int) -> None:
        kept = None if self._retention is None else self._retention.get(g, link.digest)
        stored = tier.put(g, link, level) if kept is None else tier.put(g, link, *kept)
        if stored is not None:
            write = TierWrite(g, block, stored.place, tier.block_name(stored), number, stored)
            self._writes.append((write, stored))

    def take_fills(self) -> list[TierFill]:
        """Return the blocks that the device fills before the step's block copies and chunks."""
        return [fill for fill, _ in self._fills.values()]

    def dispatched(self) -> None:
        """Note that the device has the step: its writes can be read from now on."""
        self.prefetch.changes.add(*[stored.digest for _, stored in self._writes])
        for tier in self.each:
            tier.sent()
        for full in self._full.values():  # what comes from a later tier goes to the earlier ones too
            full |= self._coming
            full |= {block: (link, 0) for block, (_, link) in self._fills.items()}
        self._begin()

    # Measurements.

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn from a step with prompts. Log the break-even once, as soon as it is known."""
        for tier in self.each:
            even = tier.break_even
            was_known = even.seconds_per_token is not None
            even.computed(tokens, seconds)
            if not was_known and even.seconds_per_token is not None and even.min_tokens is None:
                self.prefetch.changes.add_all()  # only now reading may be worth it
                least = tier.least_tokens()
                logger.info(
                    "a prompt's token is computed in %.3g ms, %s brings %.0f MB/s: %s",
                    1e3 * even.seconds_per_token,
                    tier.name,
                    even.read_rate / 1e6,
                    "nothing is read" if least is None else f"prefixes are read from {least} tokens on",
                )

    @property
    def most_swapped(self) -> float:
        """Return the most bytes of swapped blocks, in the layout's terms."""
        return self.host.for_swapped / self.each[0].shards

    def leave_swapped(self, num_bytes: int) -> None:
        """Leave so many bytes of host memory, in the layout's terms, to swapped blocks."""
        self.host.leave_swapped(num_bytes * self.each[0].shards)
        self._leave_ram()

    def _leave_ram(self) -> None:
        for tier in self.each:
            if tier.name == "ram":
                tier.leave(self.host.taken)

    def stats(self) -> dict[TierName, TierStats]:
        """Return contents and counters of each tier."""
        return {tier.name: tier.stats() for tier in self.each}

    def check(self) -> None:
        """Raise AssertionError where a count is wrong; for tests."""
        for tier in self.each:
            tier.index.check()
        self.prefetch.check()
        assert not (self._writes or self._fills or self._is_planning), "a step was planned and not dispatched"
