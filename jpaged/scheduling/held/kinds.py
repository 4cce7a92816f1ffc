"""All kinds of holds of one scheduler: those that the pool has layer groups for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from jpaged.memory import MemoryManager, ReclaimEstimate, TokenSpan
from jpaged.memory.tiers import Content
from jpaged.scheduling.held.adapters import AdapterHolds
from jpaged.scheduling.held.base import Held, Reach, StepLimits
from jpaged.scheduling.held.images import ImageHolds
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import Chunk, ScheduledStep, StepPlan

KINDS: dict[str, type[Held]] = {held.kind: held for held in (ImageHolds, AdapterHolds)}
"""The class of each kind."""


class PrefixName(NamedTuple):
    """Keeps a request's tokens apart from equal tokens of other requests in the prefix cache.

    Attributes:
        salt: of all of them.
        spans: the tokens that stand for contents, such as images, in order.
    """

    salt: Hashable
    spans: tuple[TokenSpan, ...] = ()


class Holds:
    """The kinds that a scheduler's requests may ask for. Each call goes to those that the request does ask for.

    Raises:
        ValueError: a layer group of the pool is of a kind that `KINDS` has no class for.
    """

    def __init__(self, memory: MemoryManager, limits: StepLimits) -> None:
        for kind in memory.shared:
            if kind not in KINDS:
                raise ValueError(f"a layer group keeps {kind}, and {sorted(KINDS)} are known: add its class to `KINDS`")
        self._kinds = {kind: KINDS[kind](memory, limits) for kind in memory.shared}
        self._num_groups = len(memory.layout.groups)

    def _of(self, request: Request) -> list[Held]:
        return [held for kind, held in self._kinds.items() if kind in request.asks]

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that could never be served."""
        for held in self._of(request):
            held.check(request)

    def has_place(self, request: Request, others: Iterable[Request]) -> bool:
        """Tell whether a step of `others` has a place for the request, whatever memory there is."""
        return all(held.has_place(request, others) for held in self._of(request))

    # Counts of blocks; None = no block.

    def lifetime(self, request: Request) -> list[int] | None:
        """Return the most blocks of each layer group that the request ever holds at once.

        Raises:
            ValueError: the request asks for a kind that the pool has no layer group for.
        """
        for kind in request.asks:
            if kind not in self._kinds:
                raise ValueError(f"the request asks for {kind}, which no layer group of the model keeps")
        return self._counts(request, lambda held: held.lifetime(request))

    def to_enter(self, request: Request) -> list[int] | None:
        """Return how many blocks of each layer group a waiting request takes if it is admitted now."""
        return self._counts(request, lambda held: held.to_enter(request))

    def outstanding(self, request: Request) -> list[int] | None:
        """Return how many blocks of each layer group a request that runs, or is swapped out, has yet to take."""
        return self._counts(request, lambda held: held.outstanding(request))

    def _counts(self, request: Request, count: Callable[[Held], int]) -> list[int] | None:
        if not request.asks:
            return None
        counts = [0] * self._num_groups
        for held in self._of(request):
            counts[held.blocks.group] = count(held)
        return counts if any(counts) else None

    def add_reclaimed(self, estimate: ReclaimEstimate, victim: Request, request: Request) -> None:
        """Add to `estimate` what preempting `victim` would free for `request`; what both would hold is left out."""
        for held in self._of(victim):
            estimate.add(held.blocks.group, held.reclaimed(victim, request))

    # Acquiring and releasing.

    def hold(self, request: Request) -> bool:
        """Take all that a request holds before its first chunk; return False, with nothing held, when memory is
        short."""
        if all(held.hold(request) for held in self._of(request)):
            return True
        self.release(request)
        return False

    def reach(self, request: Request, seq: Sequence, length: int, budget: int) -> Reach | None:
        """Return how far the sequence's next chunk may go by all kinds, see `Held.reach`."""
        cost = 0
        for held in self._of(request):
            if held.reads_until(request) <= seq.num_computed:
                continue
            found = held.reach(request, seq, length, budget - cost)
            if found is None:
                return None
            length, cost = found.length, cost + found.cost
        return Reach(length, cost)

    def shorten(self, request: Request, start: int, length: int, planned: Seq[Chunk]) -> int | None:
        """Return a shorter length of a chunk that needs fewer blocks, see `Held.shorten`; None where no kind has
        one."""
        found = (held.shorten(request, start, length, planned) for held in self._of(request))
        return next((shorter for shorter in found if shorter is not None), None)

    def release(self, request: Request) -> None:
        """Release what the request holds in addition to the KV of its sequences."""
        for kind, held in self._kinds.items():  # in one order, as what was released first is evicted first
            if kind in request.held:
                held.release(request)

    def forget(self, request: Request) -> None:
        """Evict what the request asks for and no request holds, see `Held.forget`."""
        for held in self._of(request):
            held.forget(request)

    def clear(self) -> None:
        """Forget all holds, after the memory was cleared."""
        for held in self._kinds.values():
            held.clear()

    # Steps.

    def reads_at(self, request: Request, position: int) -> bool:
        """Tell whether a token of the request from `position` on reads something."""
        return any(held.reads_until(request) > position for held in self._of(request))

    def add_rows(self, plan: StepPlan, request: Request, chunks: Seq[Chunk]) -> None:
        """Put what a request's chunks read into the plan."""
        for held in self._of(request):
            until = held.reads_until(request)
            if reading := [chunk for chunk in chunks if chunk.start < until]:
                plan.rows.setdefault(held.kind, []).extend(held.rows(request, reading))

    def take(self, plan: StepPlan) -> None:
        """Move what the device has to do for new holds into the plan."""
        for held in self._kinds.values():
            held.take(plan)

    def dispatched(self, step: ScheduledStep) -> None:
        """Note that the device has the step."""
        for held in self._kinds.values():
            held.dispatched(step)

    def contents(self, request: Request) -> tuple[Content, ...]:
        """Return what tiers may have of the contents that the request will hold."""
        return tuple(content for held in self._of(request) for content in held.contents(request))

    def prefix(self, request: Request) -> PrefixName:
        """Return the name under which the prefix cache has the request's tokens."""
        if not request.asks:
            return PrefixName(request.cache_salt)
        asked = self._of(request)
        salts = [part for held in asked for part in held.salt(request)]
        spans = tuple(span for held in asked for span in held.spans(request))
        return PrefixName((request.cache_salt, *salts) if salts else request.cache_salt, spans)


def made_by_weights(request: Request) -> list[str]:
    """Return the kinds that the request asks for whose contents the model's weights make."""
    return [kind for kind in request.asks if KINDS[kind].of_weights]
