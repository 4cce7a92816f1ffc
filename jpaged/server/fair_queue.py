"""Shares the engine between keys, so that a key with many requests delays its own, not those of others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from jpaged.server.access import Key
from jpaged.server.errors import ApiError


class FairQueue:
    """Admits as many requests to the engine as it can use; the others wait by key (start-time fair queueing).

    The next place goes to the waiting key with the least service for its `share`. An idle key saves nothing up: it
    resumes at the others' level. With fewer than two keys all requests are admitted.

    Args:
        keys: all keys of the server.
        places: requests at the engine at once.
        max_waiting: limit on waiting requests, of all keys; a key may have its share of them.
    """

    def __init__(self, keys: Iterable[Key], *, places: int, max_waiting: int) -> None:
        self._free = self._places = places
        self._max_waiting = max_waiting
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {key.name: deque() for key in keys}
        self._share = {key.name: key.share for key in keys}
        self._service = dict.fromkeys(self._waiting, 0.0)
        self._now = 0.0

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait for a place."""
        return sum(map(len, self._waiting.values()))

    def check_prompts(self, key: Key | None, num_prompts: int) -> None:
        """Check that the prompts of one request can ever be at the engine and in the queue together.

        Raises:
            ApiError: 400, since the key can never have so many.
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
    async def place(self, key: Key | None, *, refuses: bool = True) -> AsyncIterator[None]:
        """Wait for a place at the engine and hold it.

        Args:
            refuses: whether the place is refused rather than awaited where too many requests wait.

        Raises:
            ApiError: 429, if too many requests wait already.
        """
        if key is None or not self._shares:
            yield
            return
        await self._wait(key, refuses)
        try:
            yield
        finally:
            self._free += 1
            self._grant()

    def places(self, key: Key | None) -> Callable[[], AbstractAsyncContextManager[None]]:
        """Return what makes the places of one request's prompts, one for each.

        One prompt waits at a time, so that the request counts once. Only the first is refused where too many wait:
        what the others have computed would be lost.
        """
        turn, has_begun = asyncio.Lock(), False

        @asynccontextmanager
        async def one() -> AsyncIterator[None]:
            nonlocal has_begun
            async with AsyncExitStack() as held:
                async with turn:
                    await held.enter_async_context(self.place(key, refuses=not has_begun))
                    has_begun = True
                yield

        return one

    @property
    def _shares(self) -> bool:
        return len(self._waiting) > 1

    def _most_waiting(self, key: Key) -> int:
        return max(1, int(key.share * self._max_waiting))

    async def _wait(self, key: Key, refuses: bool) -> None:
        mine = self._waiting[key.name]
        limit = self._most_waiting(key)
        if refuses and (len(mine) >= limit or self.num_waiting >= self._max_waiting):
            owner, most = (
                (f"of the key {key.name}", limit) if len(mine) >= limit else ("of all keys", self._max_waiting)
            )
            raise ApiError(
                f"{most} requests {owner} wait already", status=429, code="engine_busy", headers={"Retry-After": "1"}
            )
        if not mine:
            self._service[key.name] = max(self._service[key.name], self._now)
        granted = asyncio.get_running_loop().create_future()
        mine.append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted just before the cancellation: pass it on
                self._free += 1
                self._grant()
            elif granted in mine:
                mine.remove(granted)
            raise

    def _grant(self) -> None:
        """Give free places to the waiting requests that are next."""
        while self._free and (names := [name for name, queue in self._waiting.items() if queue]):
            name = min(names, key=self._service.__getitem__)
            granted = self._waiting[name].popleft()
            if granted.done():  # its request was cancelled
                continue
            self._now = self._service[name]
            self._service[name] += 1 / self._share[name]
            self._free -= 1
            granted.set_result(None)
