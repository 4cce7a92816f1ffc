"""When images are encoded, and how long their features are held (Jenga, section 5: vision embeddings)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from jpaged.memory import HeldImage, MemoryManager
from jpaged.scheduling.prompt_image import PromptImage
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import Chunk, Encode, ImageRead


class Reach(NamedTuple):
    """How far a chunk may go.

    Attributes:
        length: tokens of the chunk.
        cost: tokens of the step's budget that the encoder takes for it beside them.
    """

    length: int
    cost: int


class Encoding:
    """Plans the encoder's work: an image is encoded in the step in which a chunk reaches its tokens, or before it.

    The encoder's work counts as many tokens of the step as it makes features, at most as many as a prompt can be sure
    of. An image that is in the pool, or encoded in this step for another request, costs nothing.

    Args:
        most: tokens that a prompt gets in a step however many others run.
    """

    def __init__(self, memory: MemoryManager, most: int) -> None:
        self._memory = memory
        self._most = most
        self._images: dict[bytes, PromptImage] = {}

    def check(self, request: Request, max_chunk: int) -> None:
        """Refuse images that no step could compute.

        Raises:
            ValueError: an image whose tokens see each other has more of them than a step is sure to have room for.
        """
        most = min(self._most, max_chunk)
        for number, image in enumerate(request.images, start=1):
            if image.whole and image.length > most:
                raise ValueError(
                    f"image {number} takes {image.length} tokens, which one step has to compute together, and the "
                    f"limit is {most}: max_num_batched_tokens less a token for each other sequence, or "
                    "long_prefill_token_threshold; raise these"
                )

    def reach(self, request: Request, start: int, length: int, budget: int) -> Reach | None:
        """Return how far a chunk that begins at `start` may go, and hold what it reads; None when memory is short for
        the image without which it cannot go on at all.

        Args:
            length: most tokens of the chunk.
            budget: most tokens of chunk and encoder together, at least `length`.
        """
        cost = 0
        for number, image in enumerate(request.images):
            before = image.start - start
            if image.stop <= start:
                continue
            if length <= before:
                break
            if number not in request.held:
                own = 0 if self._memory.images.holds_content(image.digest) else min(image.features, self._most)
                room = min(length, budget - cost - own)
                if before > 0 and room < before + (image.length if image.whole else 1):
                    return Reach(before, cost)  # held when a chunk begins with it, and not before
                if own > budget - cost:
                    return Reach(0, cost)
                held = self._memory.images.hold(image.digest, image.features)
                if held is None:
                    return None if before <= 0 else Reach(before, cost)
                if own:
                    self._images[image.digest] = image
                request.held[number] = held
                cost += own
                length = min(length, budget - cost)
            if length <= before or (image.whole and before + image.length > length):
                return Reach(max(before, 0), cost)
        return Reach(length, cost)

    def shorten(self, request: Request, start: int, length: int, planned: Seq[Chunk]) -> int | None:
        """Return how long a chunk may be that reads one image only, and give up what was held for the others; None
        where it reads no more than that. Admission counts the largest image, not several.

        Args:
            planned: the request's other chunks of this step, which go on reading what they read.
        """
        read = images_read(request, start, start + length)
        needed = {n for chunk in planned for n in images_read(request, chunk.start, chunk.start + chunk.length)}
        for number in read[1:]:
            if number in request.held and number not in needed:
                self._memory.images.release(request.held.pop(number))
        return request.images[read[1]].start - start if len(read) > 1 else None

    def reads(self, request: Request, chunk: Chunk) -> list[ImageRead]:
        """Return which features the chunk's tokens take."""
        stop, found = chunk.start + chunk.length, []
        for number in images_read(request, chunk.start, stop):
            image, blocks = request.images[number], request.held[number].blocks
            first, last = max(image.start, chunk.start), min(image.stop, stop)
            found.append(ImageRead(request, number, chunk.seq.seq_id, first, last, blocks))
        return found

    def take_encodes(self) -> list[Encode]:
        """Return what is to be encoded before the step's chunks."""
        if not self._images:
            return []
        pending = self._memory.images.take_pending()
        encodes = [Encode(self._images[stored.digest], stored) for stored in pending]
        self._images.clear()
        return encodes

    def dispatched(self, encodes: list[Encode], reads: list[ImageRead]) -> None:
        """Note that the device was told to encode these images, and to run the tokens of these."""
        for encode in encodes:
            self._memory.images.encoded(encode.stored)
        for read in reads:
            held = read.request.held.get(read.number)
            if held is None:
                continue
            image = read.request.images[read.number]
            if read.stop == image.stop:
                self._memory.images.release(read.request.held.pop(read.number))
            else:
                self._memory.images.consumed(held, read.stop - image.start)

    def let_go(self, request: Request) -> None:
        """Give up what a request holds; it may ask for it again."""
        held: dict[int, HeldImage] = request.held
        while held:
            self._memory.images.release(held.popitem()[1])


def images_read(request: Request, start: int, stop: int) -> list[int]:
    """Return the places, among the request's images, of those whose tokens are among [`start`, `stop`)."""
    return [n for n, image in enumerate(request.images) if image.start < stop and start < image.stop]
