"""What belongs to no sequence: images, adapters. No sequence's table holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jpaged.memory.policies.base import UNBOUNDED, Policy


class NoTable(Policy):
    """Blocks that are in no sequence's table: it is always empty, and a prefix of any length is valid without it."""

    names_tokens: ClassVar[bool] = False

    def num_blocks(self, length: int, block_size: int) -> int:
        return 0

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(0),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(UNBOUNDED)

    def alignment(self, block_size: int) -> int:
        return 1

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        return UNBOUNDED

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        return range(0)

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        return 0

    def longest_prefix(self, length: int, block_size: int) -> int:
        return length

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return 0
