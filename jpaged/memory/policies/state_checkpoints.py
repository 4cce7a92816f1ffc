"""Recurrent layers: a state of fixed size stands for all tokens so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpaged.memory.policies.base import Policy


@dataclass(frozen=True)
class StateCheckpoints(Policy):
    """One state a running sequence, and checkpoints of it that a prefix can end at (Jenga, section 5.3).

    The table has an entry for each block of tokens, as an attention layer's has, but blocks only at the entries where a
    checkpoint ends: every `interval` tokens, and at the request's own `ends`. Such a block holds the running state of
    the tokens up to its end; once the end is computed it is a checkpoint, which is never written again and is named by
    the tokens up to there, as an attention layer's block is. A running sequence needs the block of its newest state
    only.

    Attributes:
        interval: tokens between checkpoints; a multiple of the block size.
        ends: further lengths, in tokens, after which a checkpoint lies; multiples of the block size, ascending. None
            until `for_prefix` decides: then a prefix may end wherever a checkpoint is cached.

    Raises:
        ValueError: when `interval` is not positive.
    """

    interval: int
    ends: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval={self.interval} must be at least 1 token")

    def for_prefix(self, cached: int, kept: int) -> Policy:
        if self.ends is not None:
            return self
        ends = (cached, kept) if kept > cached else (cached,)
        return replace(self, ends=tuple(end for end in ends if end % self.interval))

    @property
    def optional_blocks(self) -> int:
        return 2 if self.ends is None else 0

    def end_after(self, length: int) -> int:
        """Return the end of the checkpoint that the state after `length` tokens belongs to, in tokens."""
        regular = -(-length // self.interval) * self.interval
        return min((end for end in self.ends or () if length <= end < regular), default=regular)

    def end_before(self, length: int) -> int:
        """Return the last end of a checkpoint before `length` tokens; 0 = there is none."""
        regular = max(0, -(-length // self.interval) - 1) * self.interval
        return max((end for end in self.ends or () if regular < end < length), default=regular)

    def entries_apart(self, block_size: int) -> int:
        return self.interval // block_size

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        entry = self.end_after(length) // block_size
        return (range(max(0, entry - 1), entry),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        found = [entry + 1 for entry, hit in enumerate(is_hit) if hit]
        if self.ends is not None:
            found = [blocks for blocks in found if self.end_after(blocks * block_size) == blocks * block_size]
        return [0, *found]

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        # The checkpoint that a step starts from, those that it passes and the running state.
        most = min(-(-length // self.interval), -(-step_tokens // self.interval) + 1)
        return most + (len(self.ends or ()) + self.optional_blocks if length else 0)

    def longest_prefix(self, length: int, block_size: int) -> int:
        return self.end_before(length + 1)

    def num_blocks(self, length: int, block_size: int) -> int:
        return self.end_after(length) // block_size

    def placed(self, entries: range, block_size: int) -> Sequence[int]:
        apart = self.entries_apart(block_size)
        regular = range(-(-(entries.start + 1) // apart) * apart - 1, entries.stop, apart)
        own = [entry for end in self.ends or () if (entry := end // block_size - 1) in entries]
        return sorted({*regular, *own}) if own else regular

    def holds(self, entry: int, length: int, block_size: int) -> bool:
        return self.end_before((entry + 1) * block_size) < length

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        first, last = self.end_after(start + 1), self.end_after(stop)
        return range(first // block_size - 1, last // block_size) if start < stop else range(0)

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return block_size if self.holds(block, length, block_size) else 0
