"""Serving systems to compare with: a small scheduler, and memories that reserve, split or share a pool in other ways.

None of them is built on jpaged's scheduler or memory manager. They count blocks by the policies of `jpaged.memory`,
so that a layer keeps the same tokens in every system, and only the way memory is handed out differs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jpaged.memory import GroupSpec, PoolLayout
from scripts.benchmarks.workloads import Ask

# ---------------------------------------------------------------- contiguous regions


class Buddy:
    """A binary buddy allocator over `size` slots: regions of powers of two, merged when both halves are free."""

    def __init__(self, size: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(size.bit_length())]
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[order].add(start)
                start += 1 << order
        self._most = max(order for order, starts in enumerate(self._free) if starts)

    def fits(self, size: int) -> bool:
        """Return whether an empty pool has a region of `size` slots."""
        return (size - 1).bit_length() <= self._most

    def take(self, size: int) -> tuple[int, int] | None:
        """Take a region of at least `size` slots: its (start, order), or None."""
        wanted = (size - 1).bit_length()
        order = next((o for o in range(wanted, len(self._free)) if self._free[o]), None)
        if order is None:
            return None
        start = self._free[order].pop()
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        return start, order

    def give(self, start: int, order: int) -> None:
        while order + 1 < len(self._free) and (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)


class Regions:
    """Hands out regions of one size."""

    def __init__(self, size: int, region: int) -> None:
        self._region = region
        self._free = list(range(size // region))

    def fits(self, size: int) -> bool:
        return size <= self._region

    def take(self, size: int) -> tuple[int, int] | None:
        return (self._free.pop(), 0) if self._free else None

    def give(self, start: int, order: int) -> None:
        self._free.append(start)


Reservation = Callable[[int, int], int]
"""A function (prompt, output) -> slots to reserve."""


def reservations(longest: int) -> dict[str, Reservation]:
    """Return what the three Orcas of the PagedAttention paper reserve, for requests of at most `longest` tokens."""
    return {
        "Orca (Oracle)": lambda prompt, output: prompt + output,
        "Orca (Pow2)": lambda prompt, output: min(longest, prompt + (1 << (output - 1).bit_length())),
        "Orca (Max)": lambda prompt, output: longest,
    }


# ---------------------------------------------------------------- memories


class Memory(Protocol):
    """Memory of a `SmallScheduler`. A sequence is named by a number."""

    def fits(self, prompt: int, output: int) -> bool:
        """Return whether an empty pool could hold the sequence to its end."""
        ...

    def grow(self, seq: int, tokens: int, prompt: int, output: int) -> bool:
        """Make room for the sequence's first `tokens` tokens; False where there is none, and nothing has changed."""
        ...

    def free(self, seq: int) -> None: ...

    def held_bytes(self) -> int: ...


class Contiguous:
    """Reserves one region of token slots for a sequence, at its first token (FasterTransformer, Orca).

    Args:
        slot_bytes: KV of one token in all layers.
    """

    def __init__(self, regions: Buddy | Regions, reserve: Reservation, slot_bytes: int) -> None:
        self._regions, self._reserve, self._slot_bytes = regions, reserve, slot_bytes
        self._where: dict[int, tuple[int, int]] = {}
        self._slots: dict[int, int] = {}

    def fits(self, prompt: int, output: int) -> bool:
        slots = self._reserve(prompt, output)
        return prompt + output <= slots and self._regions.fits(slots)

    def grow(self, seq: int, tokens: int, prompt: int, output: int) -> bool:
        if seq in self._where:
            return True
        slots = self._reserve(prompt, output)
        region = self._regions.take(slots)
        if region is None:
            return False
        self._where[seq], self._slots[seq] = region, slots
        return True

    def free(self, seq: int) -> None:
        if seq in self._where:
            self._regions.give(*self._where.pop(seq))
            del self._slots[seq]

    def held_bytes(self) -> int:
        return sum(self._slots.values()) * self._slot_bytes


class BlockPool(Protocol):
    """Hands out blocks of layer groups; a token names a block to give back."""

    def take(self, group: int) -> int | None: ...

    def give(self, group: int, token: int) -> None: ...

    def held_bytes(self) -> int: ...


class SplitPool:
    """Gives each group a fixed number of blocks."""

    def __init__(self, groups: Sequence[GroupSpec], shares: Sequence[int]) -> None:
        self._bytes = [spec.real_bytes for spec in groups]
        self._free = [share // size for share, size in zip(shares, self._bytes, strict=True)]
        self._all = list(self._free)

    def take(self, group: int) -> int | None:
        if not self._free[group]:
            return None
        self._free[group] -= 1
        return 0

    def give(self, group: int, token: int) -> None:
        self._free[group] += 1

    def held_bytes(self) -> int:
        taken = zip(self._all, self._free, self._bytes, strict=True)
        return sum((all_ - free) * size for all_, free, size in taken)


class GcdPool:
    """Cuts the pool into pages of the greatest common divisor of the groups' blocks, so that only bytes count.

    The cost of kernels that gather each block from many small pages is not counted.
    """

    def __init__(self, groups: Sequence[GroupSpec], pool_bytes: int) -> None:
        self._bytes = [spec.real_bytes for spec in groups]
        self._free = self._all = pool_bytes // math.gcd(*self._bytes) * math.gcd(*self._bytes)

    def take(self, group: int) -> int | None:
        if self._free < self._bytes[group]:
            return None
        self._free -= self._bytes[group]
        return 0

    def give(self, group: int, token: int) -> None:
        self._free += self._bytes[group]

    def held_bytes(self) -> int:
        return self._all - self._free


class NaivePool:
    """Jenga's large pages without request-aware placement: a sequence takes any empty block of its group's pages."""

    def __init__(self, groups: Sequence[GroupSpec], pool_bytes: int) -> None:
        layout = PoolLayout.plan(groups, pool_bytes)
        self._page_bytes = layout.page_bytes
        self._per_page = [group.blocks_per_page for group in layout.groups]
        self._pages = list(range(layout.num_pages))
        self._open: list[dict[int, int]] = [{} for _ in groups]  # page -> empty blocks, where there are any
        self._taken = 0

    def take(self, group: int) -> int | None:
        pages = self._open[group]
        if not pages:
            if not self._pages:
                return None
            self._taken += 1
            pages[self._pages.pop()] = self._per_page[group]
        page, empty = next(iter(pages.items()))
        if empty == 1:
            del pages[page]
        else:
            pages[page] = empty - 1
        return page

    def give(self, group: int, token: int) -> None:
        pages = self._open[group]
        pages[token] = pages.get(token, 0) + 1
        if pages[token] == self._per_page[group]:
            del pages[token]
            self._pages.append(token)
            self._taken -= 1

    def held_bytes(self) -> int:
        return self._taken * self._page_bytes


class BlockMemory:
    """Keeps for each sequence the blocks that the groups' policies still need, taken from a pool.

    Args:
        fitting: makes an empty pool, by which `fits` tries a sequence.
        image_tokens: tokens of images in every request.
    """

    def __init__(self, groups: Sequence[GroupSpec], fitting: Callable[[], BlockPool], image_tokens: int = 0) -> None:
        self._fitting, self._pool = fitting, fitting()
        self._rules = [(spec.policy.for_request(image_tokens), spec.block_size) for spec in groups]
        self._blocks: dict[int, list[dict[int, int]]] = {}
        self._seen: dict[int, int] = {}

    def fits(self, prompt: int, output: int) -> bool:
        pool = self._fitting()
        for g in range(len(self._rules)):
            for _ in self._needed(g, prompt + output):
                if pool.take(g) is None:
                    return False
        return True

    def _needed(self, group: int, tokens: int) -> set[int]:
        policy, size = self._rules[group]
        return {index for run in policy.active_blocks(tokens, size) for index in run}

    def grow(self, seq: int, tokens: int, prompt: int, output: int) -> bool:
        if self._seen.get(seq) == tokens:
            return True
        held = self._blocks.setdefault(seq, [{} for _ in self._rules])
        fresh: list[tuple[int, int]] = []
        for g, blocks in enumerate(held):
            needed = self._needed(g, tokens)
            for index in [index for index in blocks if index not in needed]:
                self._pool.give(g, blocks.pop(index))
            for index in needed - blocks.keys():
                token = self._pool.take(g)
                if token is None:
                    for other, gone in fresh:
                        self._pool.give(other, held[other].pop(gone))
                    return False
                blocks[index] = token
                fresh.append((g, index))
        self._seen[seq] = tokens
        return True

    def free(self, seq: int) -> None:
        for g, blocks in enumerate(self._blocks.pop(seq, [])):
            for token in blocks.values():
                self._pool.give(g, token)
        self._seen.pop(seq, None)

    def held_bytes(self) -> int:
        return self._pool.held_bytes()


# ---------------------------------------------------------------- the scheduler


@dataclass(eq=False)
class Stream:
    """One sequence of a request: `computed` of `prompt` + generated tokens are in memory."""

    seq: int
    key: int
    prompt: int
    output: int
    computed: int = 0
    generated: int = 0

    @property
    def length(self) -> int:
        return self.prompt + self.generated


@dataclass
class Step:
    """The work of one iteration.

    Attributes:
        decodes: tokens that each decoding sequence has before this step.
        prompts: (start, length) of each chunk of a prompt.
        samples: sequences that get a token.
        first: keys of requests that get their first token.
        copied: blocks that are copied.
        swapped: blocks that move to or from host memory.
        ended: keys of requests that ended with this step.
    """

    decodes: list[int] = field(default_factory=list)
    prompts: list[tuple[int, int]] = field(default_factory=list)
    samples: int = 0
    first: list[int] = field(default_factory=list)
    copied: int = 0
    swapped: int = 0
    ended: list[int] = field(default_factory=list)


class SmallScheduler:
    """First come, first served, with iteration-level batching, chunked prompts and preemption of the newest (Orca).

    Args:
        request_level: whether a batch runs to the end of its last request before another begins (FasterTransformer).
    """

    def __init__(
        self, name: str, memory: Memory, *, max_num_seqs: int, budget: int, request_level: bool = False
    ) -> None:
        self.name, self.memory = name, memory
        self.max_num_seqs, self._budget, self._request_level = max_num_seqs, budget, request_level
        self.waiting: deque[Stream] = deque()
        self.running: list[Stream] = []
        self.preemptions = 0
        self._open: dict[int, int] = {}
        self._begun: set[int] = set()
        self._done: list[int] = []
        self._count = 0

    @property
    def lengths(self) -> list[int]:
        """Return how many tokens of each running sequence are in memory."""
        return [stream.computed for stream in self.running]

    @property
    def future(self) -> int:
        """Return how many tokens the running sequences will still add."""
        return sum(stream.prompt + stream.output - stream.computed for stream in self.running)

    def add(self, key: int, ask: Ask) -> bool:
        """Queue a request, a sequence of its own for each output; False where it can never fit."""
        if not self.memory.fits(ask.prompt, ask.output) or (self._request_level and ask.n > self.max_num_seqs):
            return False
        self._open[key] = ask.n
        for _ in range(ask.n):
            self.waiting.append(Stream(self._count, key, ask.prompt, ask.output))
            self._count += 1
        return True

    def step(self) -> Step | None:
        """Run one iteration; None where nothing can run."""
        step, left, batch = Step(), self._budget, bool(self.running)
        for stream in list(self.running):
            if stream in self.running and left:
                left -= self._run(stream, min(left, stream.length - stream.computed), step)
        while self.waiting and left and len(self.running) < self.max_num_seqs and not (self._request_level and batch):
            stream = self.waiting[0]
            length = min(left, stream.length)
            if not self.memory.grow(stream.seq, length, stream.prompt, stream.output):
                break
            self.running.append(self.waiting.popleft())
            left -= self._run(stream, length, step)
        if not (step.decodes or step.prompts):
            return None
        self._end(step)
        return step

    def _run(self, stream: Stream, length: int, step: Step) -> int:
        """Compute tokens of a sequence, preempting newer ones for its memory; returns how many there were."""
        while not self.memory.grow(stream.seq, stream.computed + length, stream.prompt, stream.output):
            newest = self.running.pop()
            self.memory.free(newest.seq)
            newest.computed = 0
            self.waiting.appendleft(newest)
            self.preemptions += 1
            if newest is stream:
                return 0
        if length == 1 and stream.generated:
            step.decodes.append(stream.computed)
        else:
            step.prompts.append((stream.computed, length))
        stream.computed += length
        if stream.computed == stream.length:
            stream.generated += 1
            step.samples += 1
            if stream.key not in self._begun:
                self._begun.add(stream.key)
                step.first.append(stream.key)
        return length

    def _end(self, step: Step) -> None:
        for stream in [stream for stream in self.running if stream.generated == stream.output]:
            self.running.remove(stream)
            self.memory.free(stream.seq)
            self._open[stream.key] -= 1
            if not self._open[stream.key]:
                self._done.append(stream.key)
        if not (self._request_level and self.running):
            step.ended, self._done = self._done, []
