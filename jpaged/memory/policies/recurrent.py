"""Recurrent layers: a state of fixed size stands for all tokens so far, and each draft to be verified adds one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jpaged.memory.policies.base import UNBOUNDED, Policy

MOST_KEPT = 4
"""States that a request leaves for later ones, at most, in addition to those at multiples of the interval."""

BLOCKS_A_KEPT = 16
"""Blocks of the pool for each of these."""

PARTS_OF_INTERVAL = 8
"""A state is not kept within one of so many parts of an interval from one that is likelier to be needed: there is
little to gain. Of an answer one is kept after every part, the newest only."""


@dataclass(frozen=True)
class StateCheckpoints(Policy):
    """One state a running sequence, and checkpoints of it that a prefix can end at (Jenga, section 5.3).

    The table has an entry for each block of tokens, as an attention layer's has, but blocks only at the entries where a
    checkpoint ends: every `interval` tokens, and at the request's own `ends`. Such a block holds the running state of
    the tokens up to its end; once the end is computed it is a checkpoint, which is never written again and is named by
    the tokens up to there, as an attention layer's block is. A running sequence needs the block of its newest state
    only.

    A state may take as many bytes as attention keeps for thousands of tokens. `spacing` keeps checkpoints apart where
    they are hardly worth that: inside a prompt, which a later request seldom leaves midway. From the last multiple of
    `interval` in the prompt on, where the next turn of a conversation or the next question about a document begins,
    they lie every `interval` tokens (compare Marconi, MLSys'25, which keeps the end of a sequence and the shared
    parts of prompts).

    Attributes:
        interval: fewest tokens between two checkpoints that are not `ends`; a multiple of the block size.
        spacing: tokens between checkpoints inside a prompt whose length is known, a multiple of `interval`.
        ends: further lengths, in tokens, after which a checkpoint lies; multiples of the block size, ascending. None
            until `for_prefix` decides: then a prefix may end wherever a checkpoint is cached.
        dense_from: length in tokens, a multiple of `interval`, up to which checkpoints lie `spacing` apart.
        most_kept: most of `ends` that a request does not begin with.
        prompt: tokens of the request's prompt; None = unknown.
        answers: whether a state is kept after every eighth of an interval of an answer, the newest only.

    Raises:
        ValueError: when `interval` is not positive, or `spacing` no multiple of it.
    """

    interval: int
    ends: tuple[int, ...] | None = None
    spacing: int | None = None
    dense_from: int = 0
    most_kept: int = 1
    prompt: int | None = None
    answers: bool = False

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval={self.interval} must be at least 1 token")
        if self.spacing is not None and (self.spacing < 1 or self.spacing % self.interval):
            raise ValueError(f"spacing={self.spacing} is not a multiple of interval={self.interval}")

    def for_request(self, encoder_tokens: int, prompt_tokens: int | None = None) -> Policy:
        if prompt_tokens is None:
            return self
        dense = 0 if self.spacing is None else prompt_tokens // self.interval * self.interval
        return replace(self, dense_from=dense, prompt=prompt_tokens)

    def to_go_on(self) -> Policy:
        if self.ends is not None or self.prompt is None:
            return self
        return replace(self, dense_from=-(-self.prompt // self.interval) * self.interval)

    def for_pool(self, num_blocks: int) -> Policy:
        return replace(self, most_kept=max(1, min(MOST_KEPT, num_blocks // BLOCKS_A_KEPT)), answers=True)

    def for_prefix(self, cached: int, *kept: int) -> Policy:
        if self.ends is not None:
            return self
        apart, chosen = self.interval // PARTS_OF_INTERVAL, [cached]
        for end in kept:
            near = any(end == other or abs(end - other) < apart for other in chosen[1:])
            if cached < end and not near and len(chosen) <= self.most_kept:
                chosen.append(end)
        return replace(self, ends=tuple(end for end in sorted(chosen) if end and end != self._regular_after(end)))

    def for_little_room(self, cached: int, *kept: int, at_end: bool = True) -> Policy:
        if self.prompt is None:
            return self
        whole = -(-self.prompt // self.interval) * self.interval
        last = self._regular_before(self.prompt) if at_end else 0
        ends = {end for end in (*kept, last) if end > cached} | {cached}
        ends -= {0, whole}
        return replace(self, spacing=whole, dense_from=whole, ends=tuple(sorted(ends)))

    def _apart(self) -> int:
        """Return the tokens between two checkpoints inside a prompt."""
        return self.spacing or self.interval

    def _regular_after(self, length: int) -> int:
        """Return the first end of at least `length` tokens that is not the request's own."""
        sparse, dense = self._apart(), max(length, self.dense_from)
        return min(-(-length // sparse) * sparse, -(-dense // self.interval) * self.interval)

    def _regular_before(self, length: int) -> int:
        """Return the last end below `length` tokens that is not the request's own; 0 = there is none."""
        apart = self.interval if length > self.dense_from else self._apart()
        return max(0, -(-length // apart) - 1) * apart

    @property
    def optional_blocks(self) -> int:
        return 1 + self.most_kept if self.ends is None else 0

    def _answers_apart(self, block_size: int) -> int:
        return max(1, self.interval // PARTS_OF_INTERVAL // block_size) * block_size

    def answer_end(self, length: int, block_size: int) -> int:
        if self.prompt is None or not self.answers:
            return 0
        apart = self._answers_apart(block_size)
        end = length // apart * apart
        return end if end > self.prompt else 0

    def end_after(self, length: int) -> int:
        """Return the end of the checkpoint that the state after `length` tokens belongs to, in tokens."""
        regular = self._regular_after(length)
        return min((end for end in self.ends or () if length <= end < regular), default=regular)

    def end_before(self, length: int) -> int:
        """Return the last end of a checkpoint before `length` tokens; 0 = there is none."""
        regular = self._regular_before(length)
        return max((end for end in self.ends or () if regular < end < length), default=regular)

    def entries_apart(self, block_size: int) -> int:
        return self._apart() // block_size

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
        dense = max(0, length - self.dense_from)
        passed = -(-min(step_tokens, self.dense_from, length) // self._apart())
        passed += -(-min(step_tokens, dense) // self.interval)
        most = min(self._count(self._regular_after(length)), passed + 1)
        return most + (self._most_passed(step_tokens) + self.optional_blocks if length else 0)

    def _most_passed(self, step_tokens: int) -> int:
        """Return how many of the request's own ends one step starts from or passes, at most."""
        ends = self.ends or ()
        return max((sum(end <= other <= end + step_tokens for other in ends) for end in ends), default=0)

    def _count(self, length: int) -> int:
        """Return how many ends that are not the request's own are within the first `length` tokens."""
        if length < self.dense_from:
            return length // self._apart()
        first = max(self.dense_from, self.interval)
        return (
            -(-self.dense_from // self._apart())
            - (self.dense_from > 0)
            + ((length - first) // self.interval + 1 if length >= first else 0)
        )

    def longest_prefix(self, length: int, block_size: int) -> int:
        return self.end_before(length + 1)

    def capacity(self, num_blocks: int, block_size: int, num_slots: int) -> int:
        # The state at an answer's end is looked after when the next token needs a slot.
        end = num_blocks * block_size
        if self.prompt is None or not self.answers:
            return end
        apart = self._answers_apart(block_size)
        return min(end, -(-max(num_slots, self.prompt + 1) // apart) * apart)

    def num_blocks(self, length: int, block_size: int) -> int:
        return self.end_after(length) // block_size

    def placed(self, entries: range, block_size: int) -> Sequence[int]:
        border = max(entries.start, min(entries.stop, self.dense_from // block_size - 1))
        sparse = _multiples(range(entries.start, border), self._apart() // block_size)
        dense = _multiples(range(border, entries.stop), self.interval // block_size)
        own = [entry for end in self.ends or () if (entry := end // block_size - 1) in entries]
        return sorted({*sparse, *dense, *own}) if own or sparse else dense

    def holds(self, entry: int, length: int, block_size: int) -> bool:
        return self.end_before((entry + 1) * block_size) < length

    def written_blocks(self, start: int, stop: int, block_size: int) -> range:
        first, last = self.end_after(start + 1), self.end_after(stop)
        return range(first // block_size - 1, last // block_size) if start < stop else range(0)

    def filled_tokens(self, block: int, length: int, block_size: int) -> int:
        return block_size if self.holds(block, length, block_size) else 0


def _multiples(entries: range, apart: int) -> range:
    """Return those of a table's entries that end at a multiple of `apart` entries."""
    return range(-(-(entries.start + 1) // apart) * apart - 1, entries.stop, apart)


@dataclass(frozen=True)
class VerifiedStates(Policy):
    """A ring of states: the one after ``n`` tokens lies in entry ``n % slots``, unless a checkpoint ends there.

    They are kept in addition to the checkpoints of `StateCheckpoints`. A step of a token and its drafts leaves a state
    after each of them, each in its own entry. The next step starts from the state after the tokens that were kept, so
    nothing has to be moved. A sequence takes all entries with its first token and frees them when it ends. A prefix
    ends at a checkpoint and brings none of them along, so none counts as active.

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
