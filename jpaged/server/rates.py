"""How often each key may ask."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from jpaged.server.errors import ApiError
from jpaged.server.keys import Key


class Rates:
    """A bucket of requests for each key with a rate: it fills at the rate, and holds a minute's worth.

    Args:
        clock: returns seconds that only grow.
    """

    def __init__(self, keys: Iterable[Key], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = {key.name: (self._most(key), clock()) for key in keys if key.requests_per_minute is not None}

    def take(self, key: Key) -> None:
        """Count a request.

        Raises:
            ApiError: 429, with the seconds after which the next one is free.
        """
        if key.requests_per_minute is None:
            return
        left, since = self._left[key.name]
        now, each = self._clock(), 60 / key.requests_per_minute
        left = min(self._most(key), left + (now - since) / each)
        if left < 1:
            self._left[key.name] = left, now
            wait = math.ceil((1 - left) * each)
            raise ApiError(
                f"the key {key.name} may ask {key.requests_per_minute:g} times a minute; try again in {wait} s",
                status=429,
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )
        self._left[key.name] = left - 1, now

    @staticmethod
    def _most(key: Key) -> float:
        return max(1.0, key.requests_per_minute or 1.0)
