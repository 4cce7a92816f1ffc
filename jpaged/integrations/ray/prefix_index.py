"""Records the prompts sent to each replica, and ranks the replicas for a new prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from jpaged.validation import integer, number

Chain = Sequence[bytes]


class PrefixIndex:
    """The likely content of each replica's prefix cache: the chains (`prefix_chain`) of the last prompts sent there,
    less what the replica reports as lost.

    Args:
        max_chunks: limit on the links recorded for a replica. The least recently used are dropped first and, of one
            prompt, the tail before the head, as in a replica's cache.
    """

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = integer("max_chunks", max_chunks, low=1)
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def add(self, replica: str, chain: Chain) -> None:
        """Record that a prompt was sent to a replica."""
        held = self._held.setdefault(replica, OrderedDict())
        for link in reversed(chain):
            held[link] = None
            held.move_to_end(link)
        while len(held) > self._max_chunks:
            held.popitem(last=False)

    def follow(self, replica: str, changes: Iterable[tuple[bool | None, bytes]]) -> None:
        """Take in what a replica reports of its cache, see `HeldChains.report`."""
        for held, link in changes:
            if held:
                self.add(replica, (link,))
            elif held is None:
                self._held.pop(replica, None)
            else:
                self._held.get(replica, OrderedDict()).pop(link, None)

    def match(self, replica: str, chain: Chain) -> int:
        """Return how many of a chain's first links a replica holds."""
        held = self._held.get(replica)
        if held is None:
            return 0
        for i, link in enumerate(chain):
            if link not in held:
                return i
        return len(chain)

    def size(self, replica: str) -> int:
        """Return how many links are recorded for a replica."""
        return len(self._held.get(replica, ()))

    def keep_only(self, replicas: Sequence[str]) -> None:
        """Drop the records of all other replicas, which have ended."""
        self._held = {name: held for name, held in self._held.items() if name in replicas}


class Policy:
    """Ranks replicas by prefix, unless the best one is overloaded.

    Args:
        index: the prompts sent to each replica.
        overload: a replica with this many more requests than the least busy one gets no prompts for its prefixes.
        min_share: least part of a prompt's chain that counts as a match, in (0, 1]. A shorter match is ignored, so that
            a beginning that many prompts share spreads over many replicas.
    """

    def __init__(self, index: PrefixIndex, *, overload: int, min_share: float = 0.5) -> None:
        self._index = index
        self._overload = integer("overload", overload, low=0)
        self._min_share = number("min_share", min_share, low=0.0, high=1.0, open_low=True)
        self._choices = 0
        self._last_chosen: dict[str, int] = {}

    def ranked(self, chain: Chain, loads: Mapping[str, int]) -> list[list[str]]:
        """Return the replicas in ranks, best first; within a rank the least busy should be used.

        Args:
            loads: current requests of each replica; at least one replica.
        """
        least = min(loads.values())
        matches = {
            name: self._index.match(name, chain) for name, load in loads.items() if load - least <= self._overload
        }
        longest = max(matches.values())

        def order(name: str) -> tuple[int, int, int]:
            return loads[name], self._index.size(name), self._last_chosen.get(name, 0)

        if longest == 0 or longest < self._min_share * len(chain):
            ranks = [[name] for name in sorted(loads, key=order)]
            self._choices += 1
            self._last_chosen[ranks[0][0]] = self._choices
            return ranks
        best = [name for name, match in matches.items() if match == longest]
        rest = sorted((name for name in loads if name not in best), key=order)
        return [sorted(best, key=order), *([name] for name in rest)]

    def keep_only(self, replicas: Sequence[str]) -> None:
        """Drop the records of all other replicas, which have ended."""
        self._index.keep_only(replicas)
        self._last_chosen = {name: choice for name, choice in self._last_chosen.items() if name in replicas}
