"""The images and adapters that running requests hold in the pool."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from jpaged.memory import HeldAdapter, HeldImage, MemoryManager, StoredAdapter
from jpaged.memory.policies import UNBOUNDED
from jpaged.scheduling.inputs import Adapter, PromptImage
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import AdapterLoad, Chunk, Encode, ImageRead


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

    Images that stay (`ImageFeatures.stays`) are held until the last token that sees them was dispatched: one that is
    before the next image, or the request's last. A chunk sees one of them only.

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

    def is_due(self, request: Request, seq: Sequence) -> bool:
        """Tell whether `reach` has to be asked before the sequence goes on."""
        if not request.images:
            return False
        lacks = self._memory.images.stays and len(request.images) - 1 not in request.held
        return lacks or seq.num_computed < seq.num_prompt

    def outstanding(self, request: Request) -> int:
        """Return the features of the largest image whose blocks the request has yet to take: of any that it may read,
        or of those that stay, which somebody may hold already."""
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

    def reach(self, request: Request, start: int, length: int, budget: int) -> Reach | None:
        """Return how far a chunk that begins at `start` may go, and hold what it reads; None when memory is short for
        the image without which it cannot go on at all.

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
        read = [] if self._memory.images.stays else images_read(request, start, start + length)
        needed = {n for chunk in planned for n in images_read(request, chunk.start, chunk.start + chunk.length)}
        for number in read[1:]:
            if number in request.held and number not in needed:
                self._memory.images.release(request.held.pop(number))
        return request.images[read[1]].start - start if len(read) > 1 else None

    def reads(self, request: Request, chunk: Chunk) -> list[ImageRead]:
        """Return which features the chunk's tokens take."""
        stop, found = chunk.start + chunk.length, []
        for number, image in enumerate(request.images):
            end = seen_until(request, number) if self._memory.images.stays else image.stop
            first, last = max(image.start, chunk.start), min(end, stop)
            if first < last:
                blocks = request.held[number].blocks
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
            image, stays = read.image, self._memory.images.stays
            if read.stop == (seen_until(read.request, read.number) if stays else image.stop):
                self._memory.images.release(read.request.held.pop(read.number))
            elif not stays:
                self._memory.images.consumed(held, read.stop - image.start)

    def let_go(self, request: Request) -> None:
        """Give up what a request holds; it may ask for it again."""
        held: dict[int, HeldImage] = request.held
        while held:
            self._memory.images.release(held.popitem()[1])


def images_read(request: Request, start: int, stop: int) -> list[int]:
    """Return the places, among the request's images, of those whose tokens are among [`start`, `stop`)."""
    return [n for n, image in enumerate(request.images) if image.start < stop and start < image.stop]


def seen_until(request: Request, number: int) -> int:
    """Return the position behind the last token that sees an image which stays: the next one's, or none."""
    following = request.images[number + 1 :]
    return following[0].start if following else UNBOUNDED


class Adapting:
    """Holds the adapters of running requests in the pool.

    Args:
        memory: has the blocks.
        most: different adapters that a step can have.
    """

    def __init__(self, memory: MemoryManager, most: int) -> None:
        self._memory = memory
        self._most = most
        self._loading: dict[bytes, Adapter] = {}

    def clear(self) -> None:
        """Forget what was to be loaded: the memory was cleared."""
        self._loading.clear()

    def outstanding(self, request: Request) -> int:
        """Return how many blocks the request's adapter has yet to take: none where somebody holds it."""
        adapter = request.adapter
        if adapter is None or self._memory.adapters.in_use(adapter.digest):
            return 0
        return adapter.num_blocks

    def has_place(self, request: Request, others: Iterable[Request]) -> bool:
        """Tell whether a step of `others` has a place for the request's adapter."""
        if request.adapter is None:
            return True
        different = {other.adapter.digest for other in others if other.adapter is not None}
        return len(different | {request.adapter.digest}) <= self._most

    def hold(self, request: Request) -> bool:
        """Hold the request's adapter, which is loaded before the next step if it is not there; return False, with
        nothing changed, when memory is short."""
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
        """Forget the request's adapter where nobody holds it: the next hold finds it blocks that lie together."""
        if request.adapter is not None:
            self._memory.adapters.forget(request.adapter.digest)

    def let_go(self, request: Request) -> None:
        """Give up the request's hold on its adapter, which stays in the pool while there is room.

        One whose request could not go on alone is forgotten: its blocks lie where they leave others no large page.
        """
        held: HeldAdapter | None = request.held_adapter
        request.held_adapter = None
        if held is None:
            return
        self._memory.adapters.release(held)
        if request.alone:
            self.forget(request)

    def take_loads(self) -> list[AdapterLoad]:
        """Return what is to be loaded before the step's chunks."""
        if not self._loading:
            return []
        pending: list[StoredAdapter] = self._memory.adapters.take_pending()
        loads = [AdapterLoad(self._loading[stored.digest], stored) for stored in pending]
        self._loading.clear()
        return loads

    def dispatched(self, loads: Iterable[AdapterLoad]) -> None:
        """Note that the device was told to load these."""
        for load in loads:
            self._memory.adapters.encoded(load.stored)
