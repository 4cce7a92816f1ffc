"""Bounds the pool's share of cached states that were left for a later request and that none has begun with yet.

A state takes as many bytes as attention keeps for thousands of tokens, and where a later prompt will part from this one
is a guess. There are two kinds, and which of them serves depends on the load. Of states at known ends (of prompts,
messages and answers) it is conversations: the next prompt goes on from there. Of states at multiples of the interval
inside prompts it is questions about one document, which part before the prompt's end. So the two share a part of the
pool as recent requests did the one or the other; of either kind the oldest go first. A state that a request has begun
with, and one where recent prompts were seen to part, is no guess and stays as any other block does. One whose KV is in
use (`IN_USE`) counts from the end of that on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.layout import PoolLayout
from jpaged.memory.policies import StateCheckpoints, VerifiedStates

MOST_OF_POOL = 2
"""The pool over the bytes that guesses of both kinds may take."""

MOST_SEEN = 64
"""Requests from which on their effect is halved."""

HARDLY = 5
"""Recent requests for each one of a kind, where that kind's states are not left at all."""


class Guess(Enum):
    """Why a state was left: at the end of a prompt, message or answer, or for a prompt that parts inside."""

    AT_END = 0
    INSIDE = 1


class CheckpointShare:
    """The cached states that no sequence owns and no request began with, by their guess, the oldest first.

    Args:
        layout: how the pool is cut.
        allocator: the state of the pool's blocks.
        groups: the layer groups that have such states.

    Attributes:
        of_answers: those of the groups whose running state lies in the block of the next checkpoint.
        waiting: for each guess the blocks, as (group, block).
        interval: fewest tokens between two states inside a prompt.
        seen: how many recent requests went on from an end, and how many parted before.
    """

    def __init__(self, layout: PoolLayout, allocator: BlockAllocator, groups: Sequence[int]) -> None:
        self._allocator = allocator
        self._block_bytes = [group.block_bytes for group in layout.groups]
        self._pool_bytes = layout.pool_bytes
        self.groups = frozenset(groups)
        policies = [group.spec.policy for group in layout.groups]
        self.interval = min(policy.interval for policy in policies if isinstance(policy, StateCheckpoints))
        self.of_answers = () if any(isinstance(policy, VerifiedStates) for policy in policies) else tuple(groups)
        self.waiting: dict[Guess, OrderedDict[tuple[int, int], None]] = {guess: OrderedDict() for guess in Guess}
        self.seen = [0, 0]
        self._held_bytes = dict.fromkeys(Guess, 0)

    def arrived(self, shared: int, *, goes_on: bool) -> None:
        """Learn from a request that shares tokens with a recent one: whether it goes on from an end of that."""
        if not goes_on and shared < self.interval:
            return
        self.seen[not goes_on] += 1
        if sum(self.seen) > MOST_SEEN:
            self.seen = [number // 2 for number in self.seen]

    @property
    def goes_on(self) -> bool:
        """Return whether prompts are gone on from, and hardly ever part inside."""
        return HARDLY * (self.seen[1] + 1) < sum(self.seen) + 2

    @property
    def parts(self) -> bool:
        """Return whether prompts part inside, and are hardly ever gone on from."""
        return HARDLY * (self.seen[0] + 1) < sum(self.seen) + 2

    def is_unlikely(self, guess: Guess | None) -> bool:
        """Tell whether a state is of the kind that fewer recent requests began with: those inside prompts, unless more
        parted there than went on from an end."""
        fewer = Guess.INSIDE if self.seen[0] >= self.seen[1] else Guess.AT_END
        return guess is fewer

    def is_rarer(self, guess: Guess | None) -> bool:
        """Tell whether fewer recent requests began with states of a kind than with those of the other."""
        return guess is not None and self.seen[guess.value] < self.seen[1 - guess.value]

    def limit_bytes(self, guess: Guess) -> int:
        """Return the bytes that states of a guess may take; one may always stay."""
        share = (self.seen[guess.value] + 1) / (sum(self.seen) + 2)
        return int(self._pool_bytes // MOST_OF_POOL * share)

    def count(self, g: int) -> int:
        """Return how many blocks of a group are guesses."""
        return sum(group == g for waiting in self.waiting.values() for group, _ in waiting)

    def most(self, g: int) -> int:
        """Return how many blocks of a group may be guesses, if there were those of no other."""
        return (
            sum(max(1, self.limit_bytes(guess) // self._block_bytes[g]) for guess in Guess) if g in self.groups else 0
        )

    def left(self, g: int, block: int, guess: Guess) -> None:
        """Note a cached state that was given back; older ones of its kind go where they are too many."""
        if g not in self.groups or block not in self._allocator.groups[g].evictable:
            return
        waiting, limit = self.waiting[guess], self.limit_bytes(guess)
        if (g, block) not in waiting:
            self._held_bytes[guess] += self._block_bytes[g]
        waiting[g, block] = None
        waiting.move_to_end((g, block))
        while self._held_bytes[guess] > limit and len(waiting) > 1:
            self.drop(*next(iter(waiting)))

    def drop(self, g: int, block: int) -> None:
        """Evict a state if it is a guess that no sequence owns."""
        if any((g, block) in waiting for waiting in self.waiting.values()):
            self.forget(g, block)
            self._allocator.discard(g, block)

    def forget(self, g: int, block: int) -> None:
        """Note that a state is gone, or that a request begins with it."""
        for guess, waiting in self.waiting.items():
            if (g, block) in waiting:
                del waiting[g, block]
                self._held_bytes[guess] -= self._block_bytes[g]
