"""Images: a request holds the features that its tokens take or read (Jenga, section 5: vision embeddings)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jpaged.memory import HeldImage, ImageFeatures, MemoryManager, StoredImage, TierFill, TokenSpan
from jpaged.memory.hash_chain import Link
from jpaged.memory.policies import UNBOUNDED
from jpaged.memory.tiers import Content, Staged
from jpaged.scheduling.held.base import Arrays, Held, Reach, SavedArrays, StepLimits
from jpaged.scheduling.held.encode_parts import HalfEncoded
from jpaged.scheduling.inputs import PromptItem
from jpaged.scheduling.request import Request, Sequence, Status
from jpaged.scheduling.step import Chunk, Encode, ScheduledStep, StepPlan
from jpaged.scheduling.work import ENCODES


class ImageRead(NamedTuple):
    """Tokens [`start`, `stop`) of a sequence, by position, that take the features of one of the request's images.

    Attributes:
        number: place of the image among the request's.
        blocks: all blocks of the image's features.
    """

    request: Request
    number: int
    seq_id: int
    start: int
    stop: int
    blocks: list[int]

    @property
    def image(self) -> PromptItem:
        """Return the image."""
        found: PromptItem = self.request.asks[ImageFeatures.kind][self.number]
        return found


class _Coming(NamedTuple):
    """How the features of an image come.

    Attributes:
        missing: whether the pool lacks them.
        read: their blocks that were read from tiers, all or none.
        in_parts: whether they are encoded over several steps.
        cost: tokens of the step's budget that encoding them at once takes.
    """

    missing: bool
    read: list[tuple[Link, Staged]]
    in_parts: bool
    cost: int


class ImageHolds(Held):
    """Holds the features of images, and plans when the encoder computes them.

    An image is encoded in the step in which a chunk reaches its tokens, or before. It is held per chunk and not as a
    whole, because encoding counts against the token budget: as many tokens as take the text model as long
    (`ImageFeatures.work`), at most as many as a prompt is sure to get. An image that is in the pool, or encoded in this
    step for another request, costs nothing. One that costs more than a step is encoded over several where the encoder
    can stop between its layers (`HalfEncoded`), one image at a time. Each request that waits for it, also to begin its
    own, goes on with it: so an urgent one does not wait until less urgent ones have a turn.

    Images that stay (`ImageFeatures.stays`) are held until the last token that sees them was dispatched: the one before
    the next image, or the request's last. A chunk sees only one of them.
    """

    kind: ClassVar[str] = ImageFeatures.kind
    saved_name: ClassVar[str] = "images"
    of_weights: ClassVar[bool] = True

    def __init__(self, memory: MemoryManager, limits: StepLimits) -> None:
        super().__init__(memory, limits)
        assert isinstance(self.blocks.policy, ImageFeatures)
        self._policy, self._stays = self.blocks.policy, self.blocks.policy.stays
        # With the blocks that were read for them when they were held: those cost no budget, whatever is dropped later.
        self._encoding: dict[bytes, tuple[PromptItem, list[tuple[Link, Staged]]]] = {}
        self._filling: list[StoredImage] = []
        self._half: HalfEncoded | None = None
        self._forgets: list[Encode] = []  # of the image before, which no request holds any more

    def check(self, request: Request) -> None:
        """Refuse images that no step could compute.

        Raises:
            ValueError: an image whose tokens see each other has more tokens than a step is sure to have room for.
        """
        most = min(self._limits)
        for number, image in enumerate(_images(request), start=1):
            if image.whole and image.length > most:
                raise ValueError(
                    f"image {number} takes {image.length} tokens, which one step has to compute together, and the "
                    f"limit is {most}: max_num_batched_tokens less a token for each other sequence, or "
                    "long_prefill_token_threshold; raise these"
                )

    # Counts of blocks: those of the largest image, as an image is taken when the one before it was given back.

    def lifetime(self, request: Request) -> int:
        return self.blocks.num_blocks(max(image.features for image in _images(request)))

    def to_enter(self, request: Request) -> int:
        return self._to_come(request) if self._stays else self.lifetime(request)

    def outstanding(self, request: Request) -> int:
        if self._stays:
            return self._to_come(request)
        prompts = sum(
            seq.parent is None and seq.finish_reason is None and seq.num_computed + 1 < seq.num_tokens
            for seq in request.sequences
        )
        return prompts * self.lifetime(request) if prompts else 0

    def _to_come(self, request: Request) -> int:
        """Return the blocks of the largest image whose blocks the request has yet to take, where images stay.

        Images that another request holds take no blocks, so they do not count.
        """
        images, held = _images(request), self._held(request)
        computed = min((seq.num_computed for seq in request.live), default=0)
        coming = (
            image.features
            for number, image in enumerate(images)
            if number not in held and seen_until(images, number) > computed and not self.blocks.in_use(image.digest)
        )
        return self.blocks.num_blocks(max(coming, default=0))

    def reclaimed(self, victim: Request, request: Request) -> Iterable[int]:
        shared = {image.digest for image in request.asks.get(self.kind, ())}
        return [b for held in self._held(victim).values() if held.image.digest not in shared for b in held.kept]

    # Acquiring and releasing.

    def _work(self, image: PromptItem) -> float:
        """Return the work of encoding an image, in tokens of the text model. Features that a caller gives have no
        patches and count as one each."""
        name, work = self._policy.patches, self._policy.work
        return sum(
            len(part.arrays[name]) * work if name in part.arrays else part.features * (1.0 if name else work)
            for part in image.each
        )

    def _cost(self, image: PromptItem) -> int:
        """Return how many tokens of a step's budget encoding an image takes."""
        return max(1, math.ceil(self._work(image)))

    def _takes_steps(self, image: PromptItem) -> bool:
        """Tell whether an image is encoded over several steps: one has too few tokens, and the encoder can stop."""
        can_stop = len(self._policy.rounds) > 1 and self._policy.patches in image.arrays
        return can_stop and self._cost(image) > self._limits.sure

    def _drop_abandoned(self) -> None:
        """Give up the image that was begun and was not whole before this step, where no request holds it now."""
        if self._half is not None and not self._half.is_held:
            self._forgets += self._half.forget()
            self._half = None

    def _half_of(self, image: PromptItem) -> HalfEncoded | None:
        """Return an image's encoding over several steps, up to the step that gets the last part; None = it has none."""
        return self._half if self._half is not None and self._half.stored.digest == image.digest else None

    def _held(self, request: Request) -> dict[int, HeldImage]:
        """Return the images that the request holds, by their place among those that it asks for."""
        found: dict[int, HeldImage] = request.held.get(self.kind, {})
        return found

    def reach(self, request: Request, seq: Sequence, length: int, budget: int) -> Reach | None:
        images, start, stays = _images(request), seq.num_computed, self._stays
        held: dict[int, HeldImage] = request.held.setdefault(self.kind, {})
        if start >= seq.num_prompt and not (stays and len(images) - 1 not in held):
            return Reach(length, 0)
        self._drop_abandoned()
        cost = 0
        for number, image in enumerate(images):
            before = image.start - start
            if image.stop <= start and not (stays and seen_until(images, number) > start):
                continue
            if length <= before:
                break
            if stays and number and before > 0:
                return Reach(before, cost)
            half = self._half_of(image)
            if half is not None and not half.is_whole and before > 0:
                return Reach(before, cost)
            if number not in held:
                coming = self._coming(request.request_id, image)
                end = self._end_before(image, coming, before, length, budget - cost)
                if end is not None:
                    return Reach(end.length, cost + end.cost)
                found = self._hold(image, coming)
                if found is None:
                    return None if before <= 0 else Reach(before, cost)
                held[number] = found
                cost += coming.cost
                length = min(length, budget - cost)
                half = self._half_of(image)
            if half is not None:
                cost += half.extend(budget - cost)
                length = min(length, budget - cost)
                if not half.is_whole:
                    return Reach(0, cost)
            if length <= before or (image.whole and before + image.length > length):
                return Reach(max(before, 0), cost)
        return Reach(length, cost)

    def _coming(self, request_id: int, image: PromptItem) -> _Coming:
        """Return how the features of an image come that the request does not hold."""
        missing = not self.blocks.holds_content(image.digest)
        read = self._read(request_id, image) if missing else []
        to_encode = missing and not read
        in_parts = to_encode and self._takes_steps(image)
        cost = min(self._cost(image), self._limits.sure) if to_encode and not in_parts else 0
        return _Coming(missing, read, in_parts, cost)

    def _end_before(self, image: PromptItem, coming: _Coming, before: int, length: int, budget: int) -> Reach | None:
        """Return where a chunk ends that cannot go on into an image in this step; None = it can.

        Args:
            before: tokens of the chunk before the image's; not positive = the chunk begins inside the image.
            length: most tokens of the chunk.
            budget: tokens that the step has left.
        """
        if coming.in_parts and before > 0:
            return Reach(before, 0)
        if coming.in_parts and self._half is not None:  # one image at a time
            return Reach(0, self._half.extend(budget))
        room = min(length, budget - coming.cost)
        if before > 0 and room < before + (image.length if image.whole else 1):
            return Reach(before, 0)  # it is held when a chunk begins with it, and not before
        return Reach(0, 0) if coming.cost > budget else None

    def _hold(self, image: PromptItem, coming: _Coming) -> HeldImage | None:
        """Hold an image and plan that its features come; None = memory is short."""
        found = self.blocks.hold(image.digest, image.features)
        if found is None:
            return None
        if coming.in_parts:
            rounds, sure = self._policy.rounds, self._limits.sure
            self._half = HalfEncoded(image, found.image, self._work(image), rounds, sure)
        elif coming.missing:
            self._encoding[image.digest] = image, coming.read
        return found

    def shorten(self, request: Request, start: int, length: int, planned: Seq[Chunk]) -> int | None:
        """Return the length of a chunk that reads one image only, and release the holds on the others; None where the
        chunk reads no more than one.

        Admission counts the largest image only, so several at once may not fit.
        """
        images, held = _images(request), self._held(request)
        read = [] if self._stays else images_read(images, start, start + length)
        needed = {n for chunk in planned for n in images_read(images, chunk.start, chunk.start + chunk.length)}
        for number in read[1:]:
            if number in held and number not in needed:
                self.blocks.release(held.pop(number))
        return images[read[1]].start - start if len(read) > 1 else None

    def release(self, request: Request) -> None:
        held = self._held(request)
        while held:
            self.blocks.release(held.popitem()[1])
        request.held.pop(self.kind, None)

    def clear(self) -> None:
        self._encoding.clear()
        self._filling.clear()
        self._forgets.clear()
        self._half = None

    def contents(self, request: Request) -> Iterable[Content]:
        blocks = self.blocks
        for image in _images(request):
            links, is_here = blocks.links(image.digest, image.features), blocks.holds_content(image.digest)
            yield Content(blocks.group, links, self._cost(image), UNBOUNDED if self._stays else image.stop, is_here)

    def _read(self, request_id: int, image: PromptItem) -> list[tuple[Link, Staged]]:
        """Return the blocks of an image that were read from tiers for a request; empty where one is missing."""
        tiers, blocks = self._memory.tiers, self.blocks
        if tiers is None or not (staged := tiers.prefetch.staged(request_id)):
            return []
        read = [(link, staged.get((blocks.group, link.digest))) for link in blocks.links(image.digest, image.features)]
        found = [(link, block) for link, block in read if block is not None]
        return found if len(found) == len(read) else []

    # Steps.

    def reads_until(self, request: Request) -> int:
        return UNBOUNDED if self._stays else _images(request)[-1].stop

    def rows(self, request: Request, chunks: Seq[Chunk]) -> Iterable[ImageRead]:
        """Return the features that the chunks' tokens take."""
        images, held = _images(request), self._held(request)
        for chunk in chunks:
            stop = chunk.start + chunk.length
            for number, image in enumerate(images):
                end = seen_until(images, number) if self._stays else image.stop
                first, last = max(image.start, chunk.start), min(end, stop)
                if first < last:
                    yield ImageRead(request, number, chunk.seq.seq_id, first, last, held[number].blocks)

    def take(self, plan: StepPlan) -> None:
        self._drop_abandoned()
        part = []
        if self._half is not None:
            part = self._half.take()
            if self._half.is_whole:
                self._half = None
        plan.add_work(ENCODES, part or self._forgets)  # the first part of another takes the place of the one before
        self._forgets.clear()
        if self._encoding:
            for stored in self.blocks.take_pending():
                if stored.digest not in self._encoding:
                    continue  # encoded over several steps
                image, read = self._encoding[stored.digest]
                if read:
                    self._fill(stored, read)
                else:
                    plan.add_work(ENCODES, [Encode(image, stored)])
            self._encoding.clear()

    def _fill(self, stored: StoredImage, read: Seq[tuple[Link, Staged]]) -> None:
        """Let the step fill an image's blocks with what was read."""
        assert self._memory.tiers is not None, "a tier has read it"
        group, blocks = self.blocks.group, zip(stored.blocks, read, strict=True)
        fills = [(TierFill(group, block, content, tier), link) for block, (link, (tier, content)) in blocks]
        self._memory.tiers.fill(fills, {})
        self._filling.append(stored)

    def dispatched(self, step: ScheduledStep) -> None:
        blocks = self.blocks
        for stored in (*(encode.stored for encode in step.work_of(ENCODES) if encode.completes), *self._filling):
            blocks.encoded(stored)
        self._filling.clear()
        for read in step.rows.get(self.kind, ()):
            mine = self._held(read.request)
            held = mine.get(read.number)
            if held is None:
                continue
            image = read.image
            if read.stop == (seen_until(_images(read.request), read.number) if self._stays else image.stop):
                blocks.release(mine.pop(read.number))
            elif not self._stays:
                blocks.consumed(held, image.consumed(read.stop))

    # The prefix's name, and saved data.

    def spans(self, request: Request) -> tuple[TokenSpan, ...]:
        return tuple(image.span for image in _images(request))

    @classmethod
    def data(cls, request: Request, arrays: SavedArrays) -> list[dict[str, Any]]:
        """Return the images of a request. A finished one has none, unless it is of a pinned prefix, which may have to
        be computed again."""
        if request.status is Status.FINISHED and not request.kept_tokens:
            return []
        return [_image_data(image, arrays) for image in request.asks.get(cls.kind, ())]

    @classmethod
    def load(cls, data: Any, arrays: Seq[Arrays]) -> tuple[PromptItem, ...] | None:
        return tuple(_load_image(image, arrays) for image in data) if data else None


def _images(request: Request) -> tuple[PromptItem, ...]:
    found: tuple[PromptItem, ...] = request.asks[ImageFeatures.kind]
    return found


def images_read(images: Seq[PromptItem], start: int, stop: int) -> list[int]:
    """Return the numbers of the images of which tokens are among [`start`, `stop`)."""
    return [n for n, image in enumerate(images) if image.start < stop and start < image.stop]


def seen_until(images: Seq[PromptItem], number: int) -> int:
    """Return the position after the last token that sees an image which stays: the start of the next one, if any."""
    return images[number + 1].start if number + 1 < len(images) else UNBOUNDED


def _image_data(image: PromptItem, arrays: SavedArrays) -> dict[str, Any]:
    """Return an image of a prompt, or several that stand together."""
    return {
        "start": image.start,
        "length": image.length,
        "digest": image.digest,
        "features": image.features,
        "whole": image.whole,
        "modality": image.modality,
        "takes": None if image.takes is None else image.takes.tolist(),
        "offsets": None if image.offsets is None else image.offsets.tolist(),
        "advance": image.advance,
        "picture": None if image.parts else arrays.number(image.digest, image.arrays),
        "parts": [_image_data(part, arrays) for part in image.parts],
    }


def _load_image(data: Mapping[str, Any], arrays: Seq[Arrays]) -> PromptItem:
    """Return an image of a prompt, or several that stand together."""
    return PromptItem(
        start=data["start"],
        length=data["length"],
        digest=data["digest"],
        features=data["features"],
        arrays={} if data["picture"] is None else arrays[data["picture"]],
        whole=data["whole"],
        modality=data.get("modality", "image"),  # states of 0.2.0 have images only
        takes=_array(data.get("takes")),
        offsets=_array(data.get("offsets")),
        advance=data.get("advance"),
        parts=tuple(_load_image(part, arrays) for part in data["parts"]),
    )


def _array(values: Any) -> np.ndarray | None:
    return None if values is None else np.asarray(values, np.int32)
