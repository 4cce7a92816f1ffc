"""The interface of a kind of hold: pool blocks that a request takes in addition to the KV of its sequences.

A hold is the part of a request that leaks most easily: blocks are taken before a step and are free only after the
request was preempted, finished, aborted or failed. So every kind implements one protocol, `Held`, and the scheduler
releases all kinds in the same places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from jpaged.memory import MemoryManager, StoredImage, TokenSpan
from jpaged.memory.policies import UNBOUNDED
from jpaged.memory.shared_blocks import SharedBlocks
from jpaged.memory.tiers import Content as TierContent
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import Chunk, ScheduledStep, StepPlan

Arrays = Mapping[str, np.ndarray]


class StepLimits(NamedTuple):
    """The limits of every step.

    Attributes:
        sure: most tokens that a prompt gets in a step however many other requests run.
        chunk: most tokens of one prompt in one step.
    """

    sure: int
    chunk: int


def sure_tokens(max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Return the most tokens that a prompt gets in a step while all other sequences take one each."""
    return max_num_batched_tokens - max_num_seqs + 1


class Reach(NamedTuple):
    """The extent of a chunk, and its cost.

    Attributes:
        length: tokens of the chunk.
        cost: tokens of the step's budget that the kinds take in addition.
    """

    length: int
    cost: int


class SavedArrays:
    """Numbers the arrays that saved requests share: an encoder's input of one image is millions of numbers."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._arrays: list[Arrays] = []

    def number(self, digest: bytes, arrays: Arrays) -> int:
        """Return the number of the content of this digest; each new one gets the next."""
        if digest not in self._numbers:
            self._numbers[digest] = len(self._arrays)
            self._arrays.append(arrays)
        return self._numbers[digest]

    def data(self) -> list[Arrays]:
        """Return the arrays of each, by its number: those of the requests, not copies."""
        return self._arrays


class Held(ABC):
    """All that scheduling knows of one kind of hold, for all requests.

    A request asks for contents of the kind, ``request.asks[kind]``, and while it runs it holds some,
    ``request.held[kind]``. A request that does not ask is never passed here, except to `release`.

    A request holds what it needs from `hold` or `reach` to `release`. In between, every step calls `take` when it was
    planned and `dispatched` when the device has it. After a failure `clear` is all that is called, and `held` is empty.

    Attributes:
        kind: the kind of the layer group that has the blocks, see `jpaged.memory.policies.NoTable`.
        saved_name: name of what a request asks for in saved requests.
        of_weights: whether the model's weights make the contents, so that other weights make others.
    """

    kind: ClassVar[str]
    saved_name: ClassVar[str]
    of_weights: ClassVar[bool] = False

    def __init__(self, memory: MemoryManager, limits: StepLimits) -> None:
        self._memory = memory
        self._limits = limits

    @property
    def blocks(self) -> SharedBlocks:
        """Return the blocks of the layer group; `MemoryManager.clear` makes new ones."""
        return self._memory.shared[self.kind]

    # Refusals.

    def check(self, request: Request) -> None:  # noqa: B027  (most kinds refuse nothing)
        """Raise ValueError for a request that could never be served."""

    def has_place(self, request: Request, others: Iterable[Request]) -> bool:
        """Tell whether a step of `others` has a place for the request, whatever memory there is."""
        return True

    # Counts of blocks.

    @abstractmethod
    def lifetime(self, request: Request) -> int:
        """Return the most blocks that the request ever holds at once."""

    @abstractmethod
    def outstanding(self, request: Request) -> int:
        """Return how many blocks a request that runs, or is swapped out, has yet to take."""

    def to_enter(self, request: Request) -> int:
        """Return how many blocks a waiting request takes if it is admitted now."""
        return self.outstanding(request)

    def reclaimed(self, victim: Request, request: Request) -> Iterable[int]:
        """Return the blocks that preempting `victim` would give up, without those that `request` would share.

        Where a block is missing, admission waits longer than it has to.
        """
        return ()

    # Acquiring and releasing.

    def hold(self, request: Request) -> bool:
        """Take all that the request needs before its first chunk, unless it holds that already. Return False, with
        nothing changed, when memory is short."""
        return True

    def reach(self, request: Request, seq: Sequence, length: int, budget: int) -> Reach | None:
        """Return how far the sequence's next chunk may go, and hold what it reads; None when memory is short for
        something without which it cannot go on at all.

        Args:
            length: most tokens of the chunk.
            budget: most tokens of chunk and kinds together, at least `length`.
        """
        return Reach(length, 0)

    def shorten(self, request: Request, start: int, length: int, planned: Seq[Chunk]) -> int | None:
        """Return a shorter length of a chunk that needs fewer blocks of the kind, and release the others; None where
        there is none.

        Args:
            planned: the request's other chunks of this step, which go on reading what they read.
        """
        return None

    @abstractmethod
    def release(self, request: Request) -> None:
        """Release what the request holds, if anything. It may hold it again later."""

    def forget(self, request: Request) -> None:  # noqa: B027  (most blocks are taken where there is room)
        """Evict what the request asks for and no request holds, so that the next `hold` finds blocks that lie together
        and pin fewer large pages."""

    def clear(self) -> None:  # noqa: B027
        """Forget all holds, after the memory was cleared."""

    # Steps.

    def reads_until(self, request: Request) -> int:
        """Return the position from which on the request's tokens read nothing of the kind: nothing is held for them
        and `rows` has nothing of them."""
        return UNBOUNDED

    @abstractmethod
    def rows(self, request: Request, chunks: Seq[Chunk]) -> Iterable[Any]:
        """Return what the chunks' tokens read, as the kind's layers on the device take it."""

    @abstractmethod
    def take(self, plan: StepPlan) -> None:
        """Move what the device has to do for new holds into the plan."""

    @abstractmethod
    def dispatched(self, step: ScheduledStep) -> None:
        """Note that the device has the step."""

    def contents(self, request: Request) -> Iterable[TierContent]:
        """Return what tiers may have of the contents that the request will hold."""
        return ()

    # The prefix's name.

    def salt(self, request: Request) -> tuple[Hashable, ...]:
        """Return what keeps all of the request's KV apart in the prefix cache."""
        return ()

    def spans(self, request: Request) -> tuple[TokenSpan, ...]:
        """Return the tokens that stand for contents, in order."""
        return ()

    # Saved data.

    @classmethod
    @abstractmethod
    def data(cls, request: Request, arrays: SavedArrays) -> Any:
        """Return what the request asks for as plain data. It may ask for nothing of the kind."""

    @classmethod
    @abstractmethod
    def load(cls, data: Any, arrays: Seq[Arrays]) -> Any:
        """Return what a saved request asked for; None = nothing. `data` is None where a state does not say."""


class Content(Protocol):
    """Is what requests ask for of a kind that is held as a whole.

    Attributes:
        digest: names the content; requests that ask for equal ones share its blocks.
    """

    @property
    def digest(self) -> bytes: ...


class HeldWhole(Held):
    """A kind of which a request holds one content, as a whole, from before its first chunk on.

    ``request.asks[kind]`` is the content. The device makes it where the pool has lost it.

    Attributes:
        work: the kind of work that makes a content, see `jpaged.scheduling.work`.
    """

    work: ClassVar[str]

    def __init__(self, memory: MemoryManager, limits: StepLimits) -> None:
        super().__init__(memory, limits)
        self._making: dict[bytes, Any] = {}

    @abstractmethod
    def features(self, content: Any) -> int:
        """Return how many features the content fills, of which a block has `GroupSpec.block_size`."""

    @abstractmethod
    def made(self, content: Any, stored: StoredImage) -> Any:
        """Return the value that asks the device to make a content in the blocks of `stored`, which it names."""

    def lifetime(self, request: Request) -> int:
        return self.blocks.num_blocks(self.features(request.asks[self.kind]))

    def outstanding(self, request: Request) -> int:
        return 0 if self.blocks.in_use(request.asks[self.kind].digest) else self.lifetime(request)

    def reclaimed(self, victim: Request, request: Request) -> Iterable[int]:
        held, mine = victim.held.get(self.kind), request.asks.get(self.kind)
        is_shared = mine is not None and mine.digest == victim.asks[self.kind].digest
        return () if held is None or is_shared else held.blocks

    def hold(self, request: Request) -> bool:
        if self.kind in request.held:
            return True
        content: Content = request.asks[self.kind]
        missing = not self.blocks.holds_content(content.digest)
        held = self.blocks.hold(content.digest, self.features(content))
        if held is None:
            return False
        if missing:
            self._making[content.digest] = content
        request.held[self.kind] = held
        return True

    def release(self, request: Request) -> None:
        held = request.held.pop(self.kind, None)
        if held is None:
            return
        self.blocks.release(held)
        if request.runs_exclusively:
            self.forget(request)  # its blocks lie where they left the request no large page

    def forget(self, request: Request) -> None:
        self.blocks.forget(request.asks[self.kind].digest)

    def clear(self) -> None:
        self._making.clear()

    def take(self, plan: StepPlan) -> None:
        if self._making:
            pending = self.blocks.take_pending()
            plan.add_work(self.work, (self.made(self._making[stored.digest], stored) for stored in pending))
            self._making.clear()

    def dispatched(self, step: ScheduledStep) -> None:
        for value in step.work_of(self.work):
            self.blocks.encoded(value.stored)
