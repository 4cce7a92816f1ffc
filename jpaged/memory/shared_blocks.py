"""Blocks that belong to no sequence: a cache of images' features (Jenga, section 5) and of low-rank adapters.

Blocks belong to an image, and requests hold the image. A request whose tokens take the features' place once holds each
block until those tokens were dispatched; one whose tokens go on reading an image holds all its blocks
(`ImageFeatures.stays`). An image without a hold stays cached. Its blocks then share one eviction key, and when the
first of them is evicted the others are discarded too.

An adapter is kept the same way: all of its blocks are there or none, running requests share them, and it is read back
from the host when it is needed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from jpaged.memory.allocator import BlockAllocator
from jpaged.memory.eviction_key import EvictionKey
from jpaged.memory.hash_chain import Link
from jpaged.memory.layout import PoolLayout
from jpaged.memory.policies import NoTable


@dataclass(eq=False)
class StoredImage:
    """An image's features in the pool.

    Attributes:
        digest: names the image.
        features: how many vectors it has.
        blocks: where they lie, in order.
        users: number of holds on it.
        is_encoded: whether a dispatched step writes them.
        is_torn: whether some of the blocks were evicted: no request finds it any more.
    """

    digest: bytes
    features: int
    blocks: list[int]
    users: int = 0
    is_encoded: bool = False
    is_torn: bool = False


@dataclass(eq=False)
class HeldImage:
    """One request's hold on an image; `given` leading blocks were given back."""

    image: StoredImage
    given: int = 0

    @property
    def blocks(self) -> list[int]:
        """Return the image's blocks."""
        return self.image.blocks

    @property
    def kept(self) -> list[int]:
        """Return the blocks that the hold has not given back."""
        return self.image.blocks[self.given :]


class SharedBlocks:
    """The blocks of one layer group whose contents requests hold (images, adapters), by digest.

    Args:
        allocator: the state of the pool's blocks.
        next_tick: moves the common clock of evictions on.
        keeps: whether images without a hold stay cached.

    Attributes:
        group: number of the layer group.
        policy: the policy of that group.
        block_size: features of a block.
        on_filled: called when a block's content is there, see `Tiers.filled`; None = nothing needs it.
    """

    def __init__(
        self,
        group: int,
        policy: NoTable,
        block_size: int,
        allocator: BlockAllocator,
        next_tick: Callable[[], int],
        *,
        keeps: bool,
    ) -> None:
        self.group = group
        self.policy = policy
        self.block_size = block_size
        self._allocator = allocator
        self._next_tick = next_tick
        self._keeps = keeps
        self._images: dict[bytes, StoredImage] = {}
        self._image_of: dict[int, StoredImage] = {}  # by block, once encoded
        self._link_of: dict[int, Link] = {}  # by block, once encoded
        self.on_filled: Callable[[int, int, Link, bool], None] | None = None
        self._pending: dict[bytes, StoredImage] = {}
        self._held: dict[HeldImage, None] = {}  # in order, so that equal states are saved equally
        self._torn: list[int] = []

    # Requests.

    def holds_content(self, digest: bytes) -> bool:
        """Tell whether an image need not be encoded again: it is there, or about to be."""
        return digest in self._images

    def in_use(self, digest: bytes) -> bool:
        """Tell whether a request holds an image, so that one more hold takes no block."""
        image = self._images.get(digest)
        return image is not None and image.users > 0

    def hold(self, digest: bytes, features: int) -> HeldImage | None:
        """Hold an image or an adapter; return None, with nothing changed, if memory is short.

        One that is not stored yet gets blocks, and `take_pending` returns it.
        """
        image = self._images.get(digest)
        if image is None:
            needs = [0] * len(self._allocator.groups)
            needs[self.group] = self.num_blocks(features)
            taken = self._allocator.take(needs, self._allocator.new_request())
            if taken is None:
                return None
            image = StoredImage(digest, features, taken[self.group])
            self._images[digest] = self._pending[digest] = image
        else:
            for block in image.blocks:
                self._allocator.share(self.group, block)
        image.users += 1
        held = HeldImage(image)
        self._held[held] = None
        return held

    def take_pending(self) -> list[StoredImage]:
        """Return the images that are to be encoded before the next step, in order; each is returned once."""
        pending, self._pending = list(self._pending.values()), {}
        return pending

    def encoded(self, image: StoredImage) -> None:
        """Note that a step which encodes the image was dispatched: later requests find it."""
        image.is_encoded = True
        self._name(image)
        if self.on_filled is not None and self.policy.goes_to_tiers and self._keeps:
            for block in image.blocks:
                self.on_filled(self.group, block, self._link_of[block], True)

    def _name(self, image: StoredImage) -> None:
        self._image_of |= dict.fromkeys(image.blocks, image)
        self._link_of |= zip(image.blocks, self.links(image.digest, image.features), strict=True)

    def links(self, digest: bytes, features: int) -> tuple[Link, ...]:
        """Return the names of a content's blocks in the tiers."""
        return _links(digest, self.num_blocks(features))

    def link(self, block: int) -> Link | None:
        """Return the name of a block's content, or None where it cannot be found."""
        return self._link_of.get(block)

    def consumed(self, held: HeldImage, features: int) -> None:
        """Give back the blocks of the first `features` features, whose tokens were dispatched."""
        stop = features // self.block_size
        if stop > held.given:
            self._release(held.image, held.blocks[held.given : stop])
            held.given = stop

    def release(self, held: HeldImage) -> None:
        """End a hold. An image without any other is evictable as a whole then, or forgotten."""
        image = held.image
        del self._held[held]
        image.users -= 1
        if image.users or not self._stays(image):
            self._release(image, held.kept)
        else:  # blocks that were given back before get the same key
            for block in held.blocks[: held.given]:
                self._allocator.share(self.group, block)
            self._release(image, image.blocks)

    def _stays(self, image: StoredImage) -> bool:
        return self._keeps and image.is_encoded and not image.is_torn

    def _release(self, image: StoredImage, blocks: list[int]) -> None:
        time, keep = EvictionKey(self._next_tick(), 0), self._stays(image)
        for block in reversed(blocks):
            self._allocator.release(self.group, block, time, keep)
        ref_count = self._allocator.groups[self.group].ref_count
        if not keep and not all(ref_count[block] for block in blocks):
            self._forget(image)  # requests that hold the rest go on
            self._sweep()

    def num_blocks(self, features: int) -> int:
        """Return how many blocks so many features take."""
        return -(-features // self.block_size)

    def forget(self, digest: bytes) -> None:
        """Discard the blocks of a content without a hold: they may lie scattered over large pages."""
        image = self._images.get(digest)
        if image is not None and not image.users:
            self._forget(image)
            self._sweep()

    # Saved states.

    @property
    def cached(self) -> list[StoredImage]:
        """Return the images that can be found, with or without a hold."""
        return list(self._images.values())

    @property
    def held(self) -> list[HeldImage]:
        """Return all holds, the oldest first."""
        return list(self._held)

    def restore(self, images: list[StoredImage], holds: list[HeldImage]) -> None:
        """Restore images and holds; the caller restores their blocks in the allocator."""
        self._images = {image.digest: image for image in images if not image.is_torn}
        self._pending = {digest: image for digest, image in self._images.items() if not image.is_encoded}
        self._image_of, self._link_of = {}, {}
        for image in self._images.values():
            if image.is_encoded:
                self._name(image)
        self._held = dict.fromkeys(holds)
        for hold in holds:
            hold.image.users += 1

    def release_all(self) -> None:
        """End all holds; restored requests ask again."""
        for hold in self.held:
            self.release(hold)

    # Evictions.

    def evicted(self, block: int) -> None:
        """Note that a cached block is being evicted: the rest of its image is useless."""
        if (image := self._image_of.get(block)) is not None:
            self._forget(image)

    def torn_by(self, block: int) -> list[tuple[int, Link]]:
        """Return the blocks, and their names, of the content that is useless once a cached block is evicted."""
        image = self._image_of.get(block)
        return [] if image is None else [(mine, self._link_of[mine]) for mine in image.blocks]

    def discard_torn(self) -> None:
        """Discard the other blocks of images of which some were evicted."""
        if self._torn:
            self._sweep()

    def _forget(self, image: StoredImage) -> None:
        if image.is_torn:
            return
        image.is_torn = True
        del self._images[image.digest]
        self._pending.pop(image.digest, None)
        for block in image.blocks:
            self._image_of.pop(block, None)
            self._link_of.pop(block, None)
        self._torn += image.blocks

    def _sweep(self) -> None:
        torn, self._torn = self._torn, []
        evictable = self._allocator.groups[self.group].evictable
        for block in torn:
            if block in evictable and block not in self._image_of:
                self._allocator.discard(self.group, block)

    # Questions.

    def holds(self, g: int, block: int) -> bool:
        """Tell whether the content of a block can be found."""
        return block in self._image_of

    def owners(self) -> Counter[int]:
        """Return how many holds there are on each block."""
        return Counter(block for held in self._held for block in held.kept)

    def filled(self) -> tuple[int, int]:
        """Return (features in used blocks, each shared one once; blocks over all holds)."""
        images = {held.image for held in self._held}
        owners, size = self.owners(), self.block_size
        features = (
            min(size, image.features - i * size)
            for image in images
            for i, block in enumerate(image.blocks)
            if block in owners
        )
        return sum(features), owners.total()

    def check(self, g: int) -> None:
        """Raise AssertionError when images and blocks do not name each other."""
        for digest, image in self._images.items():
            assert image.digest == digest and not image.is_torn, "an image is found under another's name, or in part"
            named = {block for block in image.blocks if self._image_of.get(block) is image}
            assert named == (set(image.blocks) if image.is_encoded else set()), "an image's blocks are not its own"
        assert self._link_of.keys() == self._image_of.keys(), "a block has content and no name, or a name alone"
        assert set(self._image_of.values()) <= set(self._images.values()), "blocks name an image that is lost"


@lru_cache(256)
def _links(digest: bytes, num_blocks: int) -> tuple[Link, ...]:
    """Return the names of a content's blocks: it has no tokens that could be compared."""
    return tuple(
        Link(blake2b(digest + i.to_bytes(4, "little"), digest_size=16).digest(), b"") for i in range(num_blocks)
    )


StoredAdapter = StoredImage
"""An adapter in the pool; its `features` are its blocks, and it `is_encoded` once a dispatched step loads it."""

HeldAdapter = HeldImage
"""One request's hold on an adapter."""


def shared_blocks(
    layout: PoolLayout, allocator: BlockAllocator, next_tick: Callable[[], int], *, prefix_caching: bool
) -> dict[str, SharedBlocks]:
    """Return the blocks of each layer group whose contents requests hold, by its kind.

    Raises:
        ValueError: two layer groups are of one kind.
    """
    found: dict[str, SharedBlocks] = {}
    for g, plan in enumerate(layout.groups):
        policy = plan.spec.policy
        if not isinstance(policy, NoTable):
            continue
        if policy.kind in found:
            raise ValueError(f"two layer groups keep {policy.kind}: {plan.spec.name!r} is the second, and one may")
        keeps = prefix_caching or policy.always_stays
        found[policy.kind] = SharedBlocks(g, policy, plan.spec.block_size, allocator, next_tick, keeps=keeps)
    return found
