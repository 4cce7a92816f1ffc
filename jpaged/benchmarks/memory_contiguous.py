"""Reserves one contiguous region a request when it is admitted, as FasterTransformer and Orca do.

They hold every token in every layer. `ContiguousMemory` answers what the scheduler asks of a memory manager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

from jpaged.memory import BlockCopy, Fit, HostBlock


class Buddy:
    """A binary buddy allocator over `size` slots: regions of powers of two, merged when both halves are free."""

    def __init__(self, size: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(size.bit_length())]
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def fits(self, size: int) -> bool:
        """Tell whether a region of at least `size` slots is there when nothing is taken."""
        return (size - 1).bit_length() < len(self._free)

    def take(self, size: int) -> tuple[int, int] | None:
        """Take a region of at least `size` slots; returns (start, order), or None."""
        wanted = (size - 1).bit_length()
        order = next((o for o in range(wanted, len(self._free)) if self._free[o]), None)
        if order is None:
            return None
        start = self._free[order].pop()
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        return start, order

    def give_back(self, start: int, order: int) -> None:
        while order + 1 < len(self._free) and (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)


class Regions:
    """Hands out regions of one size, as `Buddy` would if it did not have to round."""

    def __init__(self, size: int, region: int) -> None:
        self._size = size // region * region
        self._free = list(range(size // region))

    def fits(self, size: int) -> bool:
        return size <= self._size

    def take(self, size: int) -> tuple[int, int] | None:
        return (self._free.pop(), 0) if self._free else None

    def give_back(self, start: int, order: int) -> None:
        self._free.append(start)


Reservation = Callable[[int, int], int]
"""A function (prompt, output) -> tokens to reserve."""


def powers_of_two(prompt: int, output: int) -> int:
    """Return what Orca (Pow2) reserves: outputs are over-reserved by at most two times."""
    return prompt + (1 << (output - 1).bit_length())


def oracle(prompt: int, output: int) -> int:
    """Return what Orca (Oracle) reserves: it knows the outputs' lengths."""
    return prompt + output


class _NoSwap:
    def holds(self, seq_id: int) -> bool:
        return False

    def take_dropped(self) -> list[HostBlock]:
        return []


class ContiguousMemory:
    """Answers what the scheduler asks of a memory manager, by regions of token slots.

    Args:
        regions: the allocator that they come from.
        reserve: how many slots a request gets.
        lengths: (prompt, output) of each sequence, by its id: a real system is told or guesses.
    """

    def __init__(self, regions: Buddy | Regions, reserve: Reservation, lengths: Sequence[tuple[int, int]]) -> None:
        self.layout = SimpleNamespace(groups=(), num_pages=0, page_bytes=0, prompt_tail=0)
        self.images = SimpleNamespace(stays=False)  # they are counted as tokens of the encoder
        self.swap_space = _NoSwap()
        self.disk = None
        self.prefix_caching = False
        self.reserved: dict[int, int] = {}
        self._regions = regions
        self._reserve = reserve
        self._lengths = lengths
        self._where: dict[int, tuple[int, int]] = {}

    def fits(self, seq_id: int) -> bool:
        """Tell whether the sequence could be served by an empty pool."""
        return self._regions.fits(self._reserve(*self._lengths[seq_id]))

    def can_admit(self, num_tokens: int, num_seqs: int = 1, **demand: object) -> Fit:
        return Fit.OK  # found out by `allocate`

    def is_tight(self, num_tokens: int, num_seqs: int = 1, **demand: object) -> bool:
        """Return False: a region is contiguous."""
        return False

    def pinned_prefix(self, token_ids: Sequence[int], **prompt: object) -> int:
        """Return 0: nothing is pinned."""
        return 0

    def outstanding(self, seq_id: int, num_tokens: int) -> list[int]:
        """Return nothing: a region is taken as a whole."""
        return []

    def add(
        self,
        seq_id: int,
        request_id: int,
        *,
        encoder_tokens: int = 0,
        prompt_tokens: int | None = None,
        kept_tokens: int = 0,
    ) -> None:
        pass

    def match_prefix(self, seq_id: int, token_ids: Sequence[int], **prompt: object) -> int:
        return 0

    def allocate(self, seq_id: int, num_tokens: int, *, first_write: int) -> list[BlockCopy] | None:
        if seq_id not in self._where:
            tokens = self._reserve(*self._lengths[seq_id])
            region = self._regions.take(tokens)
            if region is None:
                return None
            self._where[seq_id], self.reserved[seq_id] = region, tokens
        return []

    def commit(self, seq_id: int, token_ids: Sequence[int], num_computed: int) -> None:
        pass

    def capacity(self, seq_id: int) -> int:
        return self.reserved[seq_id]

    def free(self, seq_id: int) -> None:
        if seq_id in self._where:
            self._regions.give_back(*self._where.pop(seq_id))
            del self.reserved[seq_id]
