"""How much of the pool may be protected, learned from what was evicted and asked for again (as ARC does, FAST'03).

What is asked for again although it was evicted could have been found, had a part of the pool been larger: the protected
one where it had been asked for again before, else the other, where plain LRU decides. So every such token moves the
bound between the two by its own size, and neither order of eviction stays far behind the other for long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from jpaged.memory.layout import PoolLayout
from jpaged.memory.recent_prefixes import RecentPrefixes

FIRST_PART = 4
"""The pool over the bound before anything is learned: little is lost until then where plain LRU is better."""


class LostPrefixes:
    """Remembers the names of evicted blocks, as many as the pool has, and the bound that they taught.

    Args:
        layout: how the pool is cut.
        recent: what recent requests began with.

    Attributes:
        group: the layer group whose evicted blocks are noted: one that keeps every token, if any does.
        most_bytes: most bytes that may be protected.
        names: names of evicted blocks that nobody asked for since, the oldest first.
        often: names of what was asked for again, the oldest first.
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

    def asked(self, request_id: int, cached: int) -> None:
        """Learn from a request that `RecentPrefixes` was told of and that found `cached` tokens of what it shares."""
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
        """Return what `load` takes, as plain data."""
        return [self.most_bytes, list(self.names), list(self.often)]

    def load(self, most_bytes: int, names: Iterable[bytes], often: Iterable[bytes]) -> None:
        """Take over what was saved."""
        self.most_bytes = min(self._pool_bytes, most_bytes)
        self.names, self.often = OrderedDict.fromkeys(names), OrderedDict.fromkeys(often)

    def forget(self) -> None:
        """Forget the names of evicted blocks: all were given up at once, which tells nothing."""
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
