"""Layers that keep a fixed number of tokens: of the prompt, or of the whole sequence (PyramidKV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpaged.memory.policies.attention import leading_hits
from jpaged.memory.policies.base import UNBOUNDED, Policy


@dataclass(frozen=True)
class PromptBudget(Policy):
    """Full attention up to the prompt's end; there the device moves `budget` tokens of it to the first slots.

    The blocks after them are released, and later tokens take the slots after those kept: token ``p`` lies in slot
    ``p - dropped``. A step computes no tokens of both sides. Nothing is a prefix that another request could use.

    Attributes:
        budget: tokens of a prompt that are kept; fewer are all kept.
        prompt_tail: the prompt's last tokens, whose queries choose the tokens to keep.
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
        # The prompt's end and the token after it have to be allocated: that releases the blocks of dropped tokens.
        return self._drops_at if num_slots == self._drops_at else min(self._drops_at - 1, num_blocks * block_size)

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        if start < self._drops_at <= stop:  # the kept tokens move to the front
            return range(self.num_blocks(self._drops_at, block_size))
        moved = self.dropped if start >= self._drops_at else 0
        return super().written_blocks(start - moved, stop - moved, block_size)

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return super().filled_tokens(block, length - self.dropped if length > self._drops_at else length, block_size)


@dataclass(frozen=True)
class TokenBudget(Policy):
    """The first `sink` tokens, the last `recent` and, of those between, the `top` with the highest attention scores.

    Up to `budget` tokens this is full attention. Then the table no longer changes: the device writes each new token
    over one it no longer keeps, in any block. So from there on every step may write every block,
    a forked sequence copies them all, and nothing is a prefix that another request could use.

    Raises:
        ValueError: when a number is negative, or `recent` is 0 (a new token is always kept).
    """

    sink: int
    recent: int
    top: int

    def __post_init__(self) -> None:
        for name, least in (("sink", 0), ("recent", 1), ("top", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least} tokens")

    @property
    def budget(self) -> int:
        """Return how many tokens are kept."""
        return self.sink + self.recent + self.top

    def num_blocks(self, length: int, block_size: int) -> int:
        return -(-min(length, self.budget) // block_size)

    def active_blocks(self, length: int, block_size: int) -> tuple[range, ...]:
        return (range(self.num_blocks(length, block_size)),)

    def possible_prefix(self, is_hit: Sequence[bool], block_size: int) -> Sequence[int]:
        return range(min(leading_hits(is_hit), self.budget // block_size) + 1)

    def peak_blocks(self, length: int, step_tokens: int, block_size: int) -> int:
        return self.num_blocks(length, block_size)

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        # The first step beyond the budget has to be allocated: it takes shared blocks' copies and forgets hashes.
        return UNBOUNDED if num_slots > self.budget else min(self.budget, num_blocks * block_size)

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        if stop > self.budget:
            return range(self.num_blocks(stop, block_size)) if start < stop else range(0)
        return super().written_blocks(start, stop, block_size)

    def full_blocks(self, num_known: int, num_computed: int, block_size: int) -> int:
        return 0 if num_computed > self.budget else min(num_known, self.budget) // block_size

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return super().filled_tokens(block, min(length, self.budget), block_size)
