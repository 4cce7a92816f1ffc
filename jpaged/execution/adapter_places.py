"""Gives each adapter of a step a place among them, the one it had before where it had one."""

from __future__ import annotations

from collections.abc import Iterable


class AdapterPlaces:
    """Remembers which adapter is in which of `number` places; the one that was used least recently goes first.

    An adapter that stays where it is need not be read from the pool again, see `AdapterMatrices`.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._places: dict[bytes, int] = {}  # by digest, in the order of last use

    def of(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """Return the places of a step's adapters.

        Raises:
            RuntimeError: there are more different adapters than places.
        """
        step = list(dict.fromkeys(digests))
        if len(step) > self._number:
            raise RuntimeError(f"a step has {len(step)} different adapters, more than max_loras={self._number}")
        before = self._places
        others = {digest: place for digest, place in before.items() if digest not in step}
        now = {digest: before[digest] for digest in step if digest in before}
        free = [place for place in range(self._number) if place not in before.values()]
        for digest in step:
            if digest not in now:
                now[digest] = free.pop(0) if free else others.pop(next(iter(others)))
        self._places = others | now
        return now
