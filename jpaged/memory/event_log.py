"""Keeps the last changes of cached blocks, numbered, for readers outside of the engine such as routers."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import islice
from typing import Literal

from jpaged.cache_events import CacheEvent, CacheEvents, Medium
from jpaged.memory.hash_chain import Link

_Kept = tuple[Literal["stored", "removed", "cleared"], "MediumEvents", int, Link | None]


class EventLog:
    """The last changes of cached blocks of all replicas and tiers.

    An event costs one entry of a queue when it happens; what readers are told is made when they ask.

    Args:
        most: number of events that are kept.
        block_tokens: tokens of a block of each layer group; the bytes of a link after them are names of images.
    """

    def __init__(self, most: int, block_tokens: list[int]) -> None:
        self.block_tokens = block_tokens
        self._kept: deque[_Kept] = deque(maxlen=most)
        self._next = 0

    def add(self, kind: Literal["stored", "removed", "cleared"], at: MediumEvents, g: int, link: Link | None) -> None:
        """Add an event."""
        self._kept.append((kind, at, g, link))
        self._next += 1

    def since(self, number: int, most: int) -> CacheEvents:
        """Return the events from a number on, `most` at most."""
        first = self._next - len(self._kept)
        lost = not first <= number <= self._next
        start = first if lost else number
        found = islice(self._kept, start - first, start - first + most)
        events = [self._shown(start + i, *kept) for i, kept in enumerate(found)]
        return CacheEvents(events, start + len(events), lost)

    def _shown(
        self, number: int, kind: Literal["stored", "removed", "cleared"], at: MediumEvents, g: int, link: Link | None
    ) -> CacheEvent:
        if link is None:
            return CacheEvent(number, kind, at.medium, at.replica)
        tokens = tuple(array("q", link.tokens[: 8 * self.block_tokens[g]])) if kind == "stored" else ()
        return CacheEvent(
            number, kind, at.medium, at.replica, g, link.digest, link.parent if tokens else b"", tokens, link.tenant
        )


class MediumEvents:
    """Adds the events of one replica's pool, or of one tier.

    Args:
        log: where they go.
        medium, replica: see `CacheEvent`.
    """

    def __init__(self, log: EventLog, medium: Medium, replica: int) -> None:
        self._log = log
        self.medium = medium
        self.replica = replica

    def stored(self, g: int, link: Link) -> None:
        """Note that a block's content can be found; features have no tokens, by which a router could find them."""
        if link.tokens:
            self._log.add("stored", self, g, link)

    def removed(self, g: int, link: Link) -> None:
        """Note that it cannot be found any more."""
        if link.tokens:
            self._log.add("removed", self, g, link)

    def cleared(self) -> None:
        """Note that nothing can be found any more."""
        self._log.add("cleared", self, -1, None)
