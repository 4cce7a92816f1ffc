"""Remembers which replica was sent which prompts, and says which one a prompt should go to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from jpaged.validation import integer, number

Chain = Sequence[bytes]


class PrefixIndex:
    """What each replica's prefix cache is likely to hold: the chains (`prefix_chain`) of what it was sent last.

    Args:
        max_chunks: most links remembered for each replica. Those used longest ago are forgotten first, and of one
            prompt the tail before the head, as a replica's cache does it.
    """

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = integer("max_chunks", max_chunks, low=1)
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def add(self, replica: str, chain: Chain) -> None:
        """Note that a replica was sent a prompt."""
        held = self._held.setdefault(replica, OrderedDict())
        for link in reversed(chain):
            held[link] = None
            held.move_to_end(link)
        while len(held) > self._max_chunks:
            held.popitem(last=False)

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
        """Return how many links are remembered for a replica."""
        return len(self._held.get(replica, ()))

    def keep_only(self, replicas: Sequence[str]) -> None:
        """Forget all replicas but those given, as the others have ended."""
        self._held = {name: held for name, held in self._held.items() if name in replicas}


class Policy:
    """Chooses by prefix unless that replica is overloaded.

    Args:
        index: what was sent where.
        overload: requests that a replica may have more than the least busy one before prompts whose prefix it holds
            go elsewhere.
        min_share: part of a prompt's chain that a replica has to hold for that to count, in (0, 1]. Below, the prompt
            is new to all: what is common to many prompts should be held by many replicas.
    """

    def __init__(self, index: PrefixIndex, *, overload: int, min_share: float = 0.5) -> None:
        self._index = index
        self._overload = integer("overload", overload, low=0)
        self._min_share = number("min_share", min_share, low=0.0, high=1.0, open_low=True)

    def ranked(self, chain: Chain, loads: Mapping[str, int]) -> list[list[str]]:
        """Return the replicas in ranks, the preferred first; within a rank the less busy is to be taken.

        Args:
            loads: requests that each replica has now; at least one replica.
        """
        least = min(loads.values())
        matches = {
            name: self._index.match(name, chain) for name, load in loads.items() if load - least <= self._overload
        }
        longest = max(matches.values())

        def order(name: str) -> tuple[int, int]:
            return loads[name], self._index.size(name)

        if longest == 0 or longest < self._min_share * len(chain):
            return [[name] for name in sorted(loads, key=order)]
        best = [name for name, match in matches.items() if match == longest]
        rest = sorted((name for name in loads if name not in best), key=order)
        return [sorted(best, key=order), *([name] for name in rest)]
