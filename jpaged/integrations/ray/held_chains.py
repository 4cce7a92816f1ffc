"""Follows the engine's cached blocks, and tells routers which prompts' prefixes a replica has and which it lost."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from jpaged.cache_events import CacheEvent, CacheEvents

MOST_CHANGES = 4096
"""Limit on the changes that are reported at once; a router that missed more begins anew."""
MOST_LINKS = 65_536
"""Limit on the links that are followed; the oldest are reported as lost."""

Place = tuple[int, int, str]


class HeldChains:
    """The links of prompts' chains (`prefix_chain`) whose blocks a replica has, in the pool or a tier below.

    A link names so many bytes of a prompt's text, and a block so many tokens. A link stands for the block in which its
    part of the prompt's tokens ends, as if all tokens had equally many bytes.
    """

    def __init__(self) -> None:
        self._size = 0  # tokens of a block of the first layer group; other sizes make other chains
        self._at: dict[Place, set[bytes]] = {}
        self._places: Counter[bytes] = Counter()  # in how many of them a block is
        self._next_blocks: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._name: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        self._first: dict[tuple[int, ...], set[bytes]] = {}
        self._block_of: dict[bytes, bytes] = {}  # by link, the oldest first
        self._links_of: dict[bytes, set[bytes]] = {}
        self._changes: deque[tuple[bool | None, bytes]] = deque(maxlen=MOST_CHANGES)
        self._number = 0

    def follow(self, found: CacheEvents) -> None:
        """Take in the engine's events."""
        if found.lost:
            self._clear(list(self._at))
            self._change(None, b"")
        for event in found.events:
            place = event.replica, event.group, event.medium
            if event.kind == "cleared":
                self._clear([at for at in self._at if (at[0], at[2]) == (event.replica, event.medium)])
            elif event.kind == "removed":
                self._remove(place, event.digest)
            else:
                self._store(place, event)

    def served(self, chain: Sequence[bytes], token_ids: Sequence[int]) -> None:
        """Note that the engine has computed a prompt; call `follow` before with what it did since."""
        blocks = self._blocks(tuple(token_ids))
        for i, link in enumerate(chain):
            number = (i + 1) * len(token_ids) // (len(chain) + 1) // self._size if self._size else 0
            if 0 < number <= len(blocks):
                self._hold(link, blocks[number - 1])
            elif number:
                self._lose(link)

    def report(self) -> dict[str, Any]:
        """Return the last changes for routers: the number after the last one, and the changes, each with its link and
        whether it is held; None = nothing is."""
        return {"next": self._number, "changes": list(self._changes)}

    def _store(self, place: Place, event: CacheEvent) -> None:
        if not self._size and event.group == 0:
            self._size = len(event.token_ids)
        held = self._at.setdefault(place, set())
        if len(event.token_ids) != self._size or event.digest in held:
            return
        held.add(event.digest)
        self._places[event.digest] += 1
        if event.digest not in self._name and event.parent:
            name = self._name[event.digest] = event.parent, event.token_ids
            self._next_blocks[name] = event.digest
            if event.parent not in self._name:
                self._first.setdefault(event.token_ids, set()).add(event.digest)

    def _remove(self, place: Place, digest: bytes) -> None:
        held = self._at.get(place, set())
        if digest not in held:
            return
        held.discard(digest)
        self._places[digest] -= 1
        if self._places[digest]:
            return
        del self._places[digest]
        if (name := self._name.pop(digest, None)) is not None:
            self._next_blocks.pop(name, None)
            if (first := self._first.get(name[1])) is not None:
                first.discard(digest)
                if not first:
                    del self._first[name[1]]
        for link in list(self._links_of.get(digest, ())):
            self._lose(link)

    def _clear(self, places: Sequence[Place]) -> None:
        for place in places:
            for digest in list(self._at[place]):
                self._remove(place, digest)
            del self._at[place]

    def _blocks(self, tokens: tuple[int, ...]) -> list[bytes]:
        """Return the blocks of a prompt that are there, from its beginning on; of several salts the most."""
        best: list[bytes] = []
        for digest in self._first.get(tokens[: self._size], ()) if self._size else ():
            found, start = [digest], self._size
            while (after := self._next_blocks.get((found[-1], tokens[start : start + self._size]))) is not None:
                found.append(after)
                start += self._size
            best = max(best, found, key=len)
        return best

    def _hold(self, link: bytes, block: bytes) -> None:
        if (before := self._block_of.pop(link, None)) is not None:
            self._links_of[before].discard(link)
            if not self._links_of[before]:
                del self._links_of[before]
        else:
            self._change(True, link)
        self._block_of[link] = block
        self._links_of.setdefault(block, set()).add(link)
        if len(self._block_of) > MOST_LINKS:
            self._lose(next(iter(self._block_of)))

    def _lose(self, link: bytes) -> None:
        if (block := self._block_of.pop(link, None)) is not None:
            self._links_of[block].discard(link)
            if not self._links_of[block]:
                del self._links_of[block]
        self._change(False, link)

    def _change(self, held: bool | None, link: bytes) -> None:
        self._changes.append((held, link))
        self._number += 1


class ReportReader:
    """Follows the reports of one replica.

    A report that does not reach back to the last one is a gap: what was known of the replica is void.
    """

    def __init__(self) -> None:
        self._next: int | None = None

    def news(self, report: dict[str, Any]) -> list[tuple[bool | None, bytes]]:
        """Return the changes of a report that were not returned before; the first is (None, b"") after a gap."""
        end, changes = report["next"], report["changes"]
        first, seen = end - len(changes), self._next
        self._next = end
        if seen is None:
            return list(changes)
        if not first <= seen <= end:
            return [(None, b""), *changes]
        return list(islice(changes, seen - first, None))
