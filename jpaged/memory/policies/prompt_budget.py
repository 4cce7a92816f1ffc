"""Layers that read a whole prompt, then keep a fixed number of its tokens and all that follow (PyramidKV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpaged.memory.policies.base import UNBOUNDED, Policy


@dataclass(frozen=True)
class PromptBudget(Policy):
    """Full attention up to the prompt's end; there the device moves `budget` tokens of it to the first slots.

    The blocks behind are given up, and the tokens that follow take the slots after those kept: token ``p`` lies in slot
    ``p - dropped``. A step computes no tokens of both sides. Nothing is a prefix that another request could use.

    Attributes:
        budget: tokens of a prompt that are kept; fewer are all kept.
        prompt_tail: the prompt's last tokens, whose queries choose what is kept.
        prompt_tokens: length of the request's prompt; None = unknown, and nothing is dropped.

    Raises:
        ValueError: when `budget` is not positive.
    """

    budget: int
    prompt_tail: int = 0
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget={self.budget} must be at least 1 token")

    def for_request(self, encoder_tokens: int, prompt_tokens: int | None = None) -> Policy:
        return replace(self, prompt_tokens=prompt_tokens)

    @property
    def dropped(self) -> int:
        """Return how many tokens of the prompt are not kept."""
        return 0 if self.prompt_tokens is None else max(0, self.prompt_tokens - self.budget)

    @property
    def _drops_at(self) -> int:
        """Return the length from which tokens are dropped."""
        return self.prompt_tokens if self.prompt_tokens is not None and self.dropped else UNBOUNDED

    def num_blocks(self, length: int, block_size: int) -> int:
        slots = length - self.dropped if length > self._drops_at else length
        return -(-slots // block_size)

    def most_blocks(self, length: int, block_size: int) -> int:
        return -(-(length - self.dropped) // block_size) if length >= self._drops_at else UNBOUNDED

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(min(self.num_blocks(length, block_size), self.most_blocks(length, block_size))),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(1)

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        return 0

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        prompt = -(-min(length, self._drops_at) // block_size)
        return max(prompt, self.num_blocks(length, block_size))

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        if num_slots > self._drops_at:
            return num_blocks * block_size + self.dropped
        # The prompt's end and the token behind it have to be allocated: that gives up the blocks of those dropped.
        return self._drops_at if num_slots == self._drops_at else min(self._drops_at - 1, num_blocks * block_size)

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        if start < self._drops_at <= stop:  # what is kept moves to the front
            return range(self.num_blocks(self._drops_at, block_size))
        moved = self.dropped if start >= self._drops_at else 0
        return super().written_blocks(start - moved, stop - moved, block_size)

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return super().filled_tokens(block, length - self.dropped if length > self._drops_at else length, block_size)
