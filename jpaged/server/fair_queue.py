"""Shares the engine between keys: one that asks much waits behind itself, not before others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from jpaged.server.access import Key
from jpaged.server.errors import ApiError


class FairQueue:
    """Lets as many requests to the engine as it can use, and the others wait by key (start-time fair queueing).

    The next place goes to the waiting key that has got least for its `share`. A key that was idle begins where the
    others are: it saves nothing up. With fewer than two keys there is nothing to share, and all go through.

    Args:
        keys: all that there are.
        places: requests at the engine at once.
        max_waiting: most requests that wait, of all keys; of one key, its share of them.
    """

    def __init__(self, keys: Iterable[Key], *, places: int, max_waiting: int) -> None:
        self._free = self._places = places
        self._max_waiting = max_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {key.name: deque() for key in keys}
        self._share = {key.name: key.share for key in keys}
        self._got = dict.fromkeys(self._waiting, 0.0)
        self._now = 0.0

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait for a place."""
        return sum(map(len, self._waiting.values()))

    def check_prompts(self, key: Key | None, num_prompts: int) -> None:
        """Check that so many prompts of one request can be at the engine and waiting together, if nothing else is.

        Raises:
            ApiError: 400, as the key can never have so many.
        """
        if key is None or not self._shares:
            return
        most = self._places + self._most_waiting(key)
        if num_prompts > most:
            raise ApiError(
                f"prompt has {num_prompts} prompts; the key {key.name} can have {most} at once",
                param="prompt",
                code="invalid_value",
            )

    @asynccontextmanager
    async def place(self, key: Key | None) -> AsyncIterator[None]:
        """Hold a place at the engine, once it is the key's turn.

        Raises:
            ApiError: 429, as too many wait already.
        """
        if key is None or not self._shares:
            yield
            return
        await self._wait(key)
        try:
            yield
        finally:
            self._free += 1
            self._give()

    @property
    def _shares(self) -> bool:
        return len(self._waiting) > 1

    def _most_waiting(self, key: Key) -> int:
        return max(1, int(key.share * self._max_waiting))

    async def _wait(self, key: Key) -> None:
        mine = self._waiting[key.name]
        limit = self._most_waiting(key)
        if len(mine) >= limit or self.num_waiting >= self._max_waiting:
            whose, most = (
                (f"of the key {key.name}", limit) if len(mine) >= limit else ("of all keys", self._max_waiting)
            )
            raise ApiError(
                f"{most} requests {whose} wait already", status=429, code="engine_busy", headers={"Retry-After": "1"}
            )
        if not mine:
            self._got[key.name] = max(self._got[key.name], self._now)
        turn = asyncio.get_running_loop().create_future()
        mine.append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given just now, and nobody takes it
                self._free += 1
                self._give()
            elif turn in mine:
                mine.remove(turn)
            raise

    def _give(self) -> None:
        """Give free places to those whose turn it is."""
        while self._free and (names := [name for name, queue in self._waiting.items() if queue]):
            name = min(names, key=self._got.__getitem__)
            turn = self._waiting[name].popleft()
            if turn.done():  # its request was cancelled
                continue
            self._now = self._got[name]
            self._got[name] += 1 / self._share[name]
            self._free -= 1
            turn.set_result(None)
