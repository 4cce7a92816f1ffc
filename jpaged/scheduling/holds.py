"""Holds: pool blocks that a request takes in addition to the KV of its sequences, such as images and adapters.

A hold is the part of a request that leaks most easily: blocks are taken before a step and are free only after the
request was preempted, finished, aborted or failed. So every kind of hold implements one protocol, `Held`, and the
scheduler releases all kinds in the same places. A new kind is one subclass, given to `Scheduler(holds=...)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from jpaged.memory import HeldAdapter, HeldImage, MemoryManager, ReclaimEstimate, StoredAdapter
from jpaged.memory.policies import UNBOUNDED
from jpaged.scheduling.inputs import Adapter, PromptImage
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import AdapterLoad, Chunk, Encode, ImageRead, ScheduledStep, StepPlan
from jpaged.scheduling.work import ENCODES, LOADS


class Held(ABC):
    """One kind of hold, for all requests.

    A request holds what it needs from `hold` to `release`. In between, every step calls `take` when it was planned and
    `dispatched` when the device has it. After a failure `clear` is all that is called.

    Attributes:
        grows: whether a request that runs may have blocks of this kind yet to take. Admission counts these as taken.
    """

    grows: bool = False

    def check(self, request: Request) -> None:  # noqa: B027  (most kinds refuse nothing)
        """Raise ValueError for a request that could never be served."""

    def has_place(self, request: Request, others: Iterable[Request]) -> bool:
        """Tell whether a step of `others` has a place for the request, whatever memory there is."""
        return True

    def outstanding(self, request: Request) -> list[int] | None:
        """Return how many blocks of each group the request has yet to take; None = no block."""
        return None

    def hold(self, request: Request) -> bool:
        """Take all that the request needs before its first chunk, unless it holds that already. Return False, with
        nothing changed, when memory is short."""
        return True

    def add_reclaimed(self, estimate: ReclaimEstimate, victim: Request, request: Request) -> None:  # noqa: B027
        """Add to `estimate` what preempting `victim` would free for `request`; leave out what both of them hold.
        Where nothing is added, admission waits longer than it has to."""

    @abstractmethod
    def release(self, request: Request) -> None:
        """Release what the request holds, if anything. It may hold it again later."""

    @abstractmethod
    def take(self, plan: StepPlan) -> None:
        """Move what the device has to do for new holds into the plan."""

    @abstractmethod
    def dispatched(self, step: ScheduledStep) -> None:
        """Note that the device has the step."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all holds, after the memory was cleared."""


class Reach(NamedTuple):
    """The extent of a chunk, and its cost.

    Attributes:
        length: tokens of the chunk.
        cost: tokens of the step's budget that the encoder takes in addition.
    """

    length: int
    cost: int


class ImageHolds(Held):
    """Holds the features of images, and plans when the encoder computes them (Jenga, section 5: vision embeddings).

    An image is encoded in the step in which a chunk reaches its tokens, or before. It is held per chunk and not as a
    whole, because encoding counts against the token budget: as many tokens as it makes features, at most as many as a
    prompt is sure to get. An image that is in the pool, or encoded in this step for another request, costs nothing.

    Images that stay (`ImageFeatures.stays`) are held until the last token that sees them was dispatched: the one before
    the next image, or the request's last. A chunk sees only one of them.

    Args:
        most: tokens that a prompt gets in a step however many other requests run.
        max_chunk: most tokens of one prompt in one step.
    """

    def __init__(self, memory: MemoryManager, most: int, max_chunk: int) -> None:
        self._memory = memory
        self._most = most
        self._max_chunk = max_chunk
        self._encoding: dict[bytes, PromptImage] = {}
        self.grows = memory.images.stays

    def check(self, request: Request) -> None:
        """Refuse images that no step could compute.

        Raises:
            ValueError: an image whose tokens see each other has more tokens than a step is sure to have room for.
        """
        most = min(self._most, self._max_chunk)
        for number, image in enumerate(request.images, start=1):
            if image.whole and image.length > most:
                raise ValueError(
                    f"image {number} takes {image.length} tokens, which one step has to compute together, and the "
                    f"limit is {most}: max_num_batched_tokens less a token for each other sequence, or "
                    "long_prefill_token_threshold; raise these"
                )

    def is_due(self, request: Request, seq: Sequence) -> bool:
        """Tell whether the sequence needs `reach` before it goes on."""
        if not request.images:
            return False
        lacks = self._memory.images.stays and len(request.images) - 1 not in request.held
        return lacks or seq.num_computed < seq.num_prompt

    def features(self, request: Request) -> int:
        """Return the features of the largest image whose blocks the request has yet to take.

        Images that stay and that another request holds take no blocks, so they do not count.
        """
        if not self._memory.images.stays:
            return request.encoder_tokens
        computed = min((seq.num_computed for seq in request.live), default=0)
        coming = (
            image.features
            for number, image in enumerate(request.images)
            if number not in request.held
            and seen_until(request, number) > computed
            and not self._memory.images.in_use(image.digest)
        )
        return max(coming, default=0)

    def outstanding(self, request: Request) -> list[int] | None:
        if not (request.images and self.grows):
            return None
        return self._memory.images.blocks_for(self.features(request))

    def reach(self, request: Request, start: int, length: int, budget: int) -> Reach | None:
        """Return how far a chunk that begins at `start` may go, and hold the images that it reads; None when memory is
        short for the image without which it cannot go on at all.

        Args:
            length: most tokens of the chunk.
            budget: most tokens of chunk and encoder together, at least `length`.
        """
        cost, stays = 0, self._memory.images.stays
        for number, image in enumerate(request.images):
            before = image.start - start
            if image.stop <= start and not (stays and seen_until(request, number) > start):
                continue
            if length <= before:
                break
            if stays and number and before > 0:
                return Reach(before, cost)
            if number not in request.held:
                own = 0 if self._memory.images.holds_content(image.digest) else min(image.features, self._most)
                room = min(length, budget - cost - own)
                if before > 0 and room < before + (image.length if image.whole else 1):
                    return Reach(before, cost)  # it is held when a chunk begins with it, and not before
                if own > budget - cost:
                    return Reach(0, cost)
                held = self._memory.images.hold(image.digest, image.features)
                if held is None:
                    return None if before <= 0 else Reach(before, cost)
                if own:
                    self._encoding[image.digest] = image
                request.held[number] = held
                cost += own
                length = min(length, budget - cost)
            if length <= before or (image.whole and before + image.length > length):
                return Reach(max(before, 0), cost)
        return Reach(length, cost)

    def shorten(self, request: Request, start: int, length: int, planned: Seq[Chunk]) -> int | None:
        """Return the length of a chunk that reads one image only, and release the holds on the others; None where the
        chunk reads no more than one.

        Admission counts the largest image only, so several at once may not fit.

        Args:
            planned: the request's other chunks of this step, which go on reading their images.
        """
        read = [] if self._memory.images.stays else images_read(request, start, start + length)
        needed = {n for chunk in planned for n in images_read(request, chunk.start, chunk.start + chunk.length)}
        for number in read[1:]:
            if number in request.held and number not in needed:
                self._memory.images.release(request.held.pop(number))
        return request.images[read[1]].start - start if len(read) > 1 else None

    def reads(self, request: Request, chunk: Chunk) -> list[ImageRead]:
        """Return the features that the chunk's tokens take."""
        stop, found = chunk.start + chunk.length, []
        for number, image in enumerate(request.images):
            end = seen_until(request, number) if self._memory.images.stays else image.stop
            first, last = max(image.start, chunk.start), min(end, stop)
            if first < last:
                blocks = request.held[number].blocks
                found.append(ImageRead(request, number, chunk.seq.seq_id, first, last, blocks))
        return found

    def add_reclaimed(self, estimate: ReclaimEstimate, victim: Request, request: Request) -> None:
        for held in victim.held.values():
            if all(image.digest != held.image.digest for image in request.images):
                estimate.add_image(held)

    def release(self, request: Request) -> None:
        held: dict[int, HeldImage] = request.held
        while held:
            self._memory.images.release(held.popitem()[1])

    def take(self, plan: StepPlan) -> None:
        if self._encoding:
            pending = self._memory.images.take_pending()
            plan.add_work(ENCODES, (Encode(self._encoding[stored.digest], stored) for stored in pending))
            self._encoding.clear()

    def dispatched(self, step: ScheduledStep) -> None:
        images = self._memory.images
        for encode in step.work_of(ENCODES):
            images.encoded(encode.stored)
        for read in step.reads:
            held = read.request.held.get(read.number)
            if held is None:
                continue
            image = read.image
            if read.stop == (seen_until(read.request, read.number) if images.stays else image.stop):
                images.release(read.request.held.pop(read.number))
            elif not images.stays:
                images.consumed(held, read.stop - image.start)

    def clear(self) -> None:
        self._encoding.clear()


def images_read(request: Request, start: int, stop: int) -> list[int]:
    """Return the numbers of the request's images of which tokens are among [`start`, `stop`)."""
    return [n for n, image in enumerate(request.images) if image.start < stop and start < image.stop]


def seen_until(request: Request, number: int) -> int:
    """Return the position after the last token that sees an image which stays: the start of the next one, if any."""
    following = request.images[number + 1 :]
    return following[0].start if following else UNBOUNDED


class AdapterHolds(Held):
    """Holds the low-rank adapters of running requests, each as a whole, and plans when the device loads them.

    Args:
        most: different adapters that a step can have.
    """

    def __init__(self, memory: MemoryManager, most: int) -> None:
        self._memory = memory
        self._most = most
        self._loading: dict[bytes, Adapter] = {}

    def has_place(self, request: Request, others: Iterable[Request]) -> bool:
        if request.adapter is None:
            return True
        different = {other.adapter.digest for other in others if other.adapter is not None}
        return len(different | {request.adapter.digest}) <= self._most

    def num_blocks(self, request: Request) -> int:
        """Return how many blocks the request's adapter has yet to take: 0 where another request holds it."""
        adapter = request.adapter
        if adapter is None or self._memory.adapters.in_use(adapter.digest):
            return 0
        return adapter.num_blocks

    def outstanding(self, request: Request) -> list[int] | None:
        return self._memory.adapters.blocks_for(self.num_blocks(request))

    def hold(self, request: Request) -> bool:
        adapter = request.adapter
        if adapter is None or request.held_adapter is not None:
            return True
        missing = not self._memory.adapters.holds_content(adapter.digest)
        held = self._memory.adapters.hold(adapter.digest, adapter.num_blocks)
        if held is None:
            return False
        if missing:
            self._loading[adapter.digest] = adapter
        request.held_adapter = held
        return True

    def forget(self, request: Request) -> None:
        """Evict the request's adapter if no request holds it, so that the next `hold` finds blocks that lie together
        and pin fewer large pages."""
        if request.adapter is not None:
            self._memory.adapters.forget(request.adapter.digest)

    def add_reclaimed(self, estimate: ReclaimEstimate, victim: Request, request: Request) -> None:
        if victim.held_adapter is not None and not victim.shares_adapter(request):
            estimate.add_adapter(victim.held_adapter)

    def release(self, request: Request) -> None:
        held: HeldAdapter | None = request.held_adapter
        request.held_adapter = None
        if held is None:
            return
        self._memory.adapters.release(held)
        if request.runs_exclusively:
            self.forget(request)  # its blocks lie where they left the request no large page

    def take(self, plan: StepPlan) -> None:
        if self._loading:
            pending: list[StoredAdapter] = self._memory.adapters.take_pending()
            plan.add_work(LOADS, (AdapterLoad(self._loading[stored.digest], stored) for stored in pending))
            self._loading.clear()

    def dispatched(self, step: ScheduledStep) -> None:
        for load in step.work_of(LOADS):
            self._memory.adapters.encoded(load.stored)

    def clear(self) -> None:
        self._loading.clear()
