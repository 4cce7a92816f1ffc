"""States of a sequence that verifies drafts: one behind each token of a step, as nobody knows yet which will stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpaged.memory.policies.base import UNBOUNDED, Policy


@dataclass(frozen=True)
class VerifiedStates(Policy):
    """A ring of states: the one after ``n`` tokens lies in entry ``n % slots``, unless a checkpoint ends there.

    They stand beside the checkpoints of `StateCheckpoints`. A step of a token and its drafts leaves a state behind each
    of them, all in entries of their own; the next step starts from the one behind the tokens that were kept, wherever
    that is, and nothing has to be told or moved. A sequence takes all entries with its first token and gives them up
    when it ends. A prefix ends at a checkpoint and brings none of them along, so none counts as active.

    Attributes:
        slots: number of entries, the drafts of a step and one more at least.

    Raises:
        ValueError: when `slots` is not positive.
    """

    slots: int

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots={self.slots} must be at least 1 state")

    def num_blocks(self, length: int, block_size: int) -> int:
        return self.slots if length else 0

    def placed(self, entries: range, block_size: int) -> Sequence[int]:
        return range(entries.start, max(entries.start, min(entries.stop, self.slots)))

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(0),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(UNBOUNDED)

    def alignment(self, block_size: int) -> int:
        return 1

    def longest_prefix(self, length: int, block_size: int) -> int:
        return length

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        return 0

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return self.num_blocks(length, block_size)

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        return UNBOUNDED

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        return range(self.slots) if start < stop else range(0)

    def holds(self, entry: int, length: int, block_size: int) -> bool:
        return entry == length % self.slots

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return block_size if length and self.holds(block, length, block_size) else 0
