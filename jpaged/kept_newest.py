"""Keeps the values that were asked for last, within two bounds."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class KeptNewest(Generic[T]):
    """Keeps values by key; those that were asked for least recently are dropped. Its owner guards it by a lock.

    Args:
        most: how many values are kept.
        most_size: the most that they have together, in the unit of `put`.
    """

    def __init__(self, most: int, most_size: int) -> None:
        self._most = most
        self._most_size = most_size
        self._kept: dict[Hashable, tuple[T, int]] = {}

    def get(self, key: Hashable) -> T | None:
        """Return a value, which becomes the newest; None if it is not kept."""
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self._kept[key] = found
        return found[0]

    def put(self, key: Hashable, value: T, size: int) -> None:
        """Keep a value of some size; one that is above the bound alone is not kept, nor is what was older."""
        self._kept[key] = value, size
        while len(self._kept) > self._most or sum(size for _, size in self._kept.values()) > self._most_size:
            del self._kept[next(iter(self._kept))]
