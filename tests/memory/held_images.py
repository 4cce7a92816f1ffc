"""Gives sequences of `memory_machine.py` images as a scheduler does: held, encoded, taken or read, and released."""

from __future__ import annotations

from typing import Protocol

from memory_shadow import ShadowPool

from jpaged.memory import GroupSpec, ImageFeatures, MemoryManager
from jpaged.memory.shared_blocks import HeldImage

EMBEDDINGS = GroupSpec("embeddings", layer_bytes=3, num_layers=1, block_size=2, policy=ImageFeatures())
"""Features that tokens of the prompt take the place of, once."""
IMAGE_KV = GroupSpec("image KV", layer_bytes=1, num_layers=4, block_size=2, policy=ImageFeatures(stays=True))
"""K and V of images, which all later tokens read."""
FEATURES = {b"cat": 3, b"dog": 6, b"owl": 7, b"elk": 5}
"""Features of each image that a prompt may have."""


class Seer(Protocol):
    """A sequence that may see an image, named by `image`, and holds it by `held`."""

    image: bytes | None
    held: HeldImage | None
    computed: int


class Images:
    """Holds images in a pool for sequences, and checks that those who hold one find it."""

    def __init__(self, manager: MemoryManager, shadow: ShadowPool) -> None:
        self.blocks, self.shadow = manager.shared.get("images"), shadow

    @property
    def any(self) -> bool:
        """Whether the pool takes images."""
        return self.blocks is not None

    def hold(self, life: Seer) -> bool:
        """Have a sequence hold its image for its next chunk; False = memory is short."""
        if not self._needs(life) or life.held is not None or life.image is None:
            return True
        life.held = self.blocks.hold(life.image, FEATURES[life.image])
        return life.held is not None

    def encode(self) -> None:
        """Write the images that were asked for, before anything else of the step."""
        for image in self.blocks.take_pending() if self.any else ():
            for feature in range(image.features):
                block, offset = image.blocks[feature // self.blocks.block_size], feature % self.blocks.block_size
                self.shadow.put(self.blocks.group, block, offset, ("image", image.digest, feature))
            self.blocks.encoded(image)

    def took(self, life: Seer) -> None:
        """Give up what a sequence's computed tokens have taken."""
        if life.held is None or self.blocks.policy.stays:
            return
        self.blocks.consumed(life.held, min(life.computed, life.held.image.features))
        if not self._needs(life):
            self.release(life)

    def release(self, life: Seer) -> None:
        """Give up a sequence's image, where it holds one."""
        if life.held is not None:
            self.blocks.release(life.held)
            life.held = None

    def check(self, life: Seer) -> None:
        """Find the features that a sequence has yet to take, or reads."""
        if life.held is None or not life.held.image.is_encoded:
            return
        image, size = life.held.image, self.blocks.block_size
        for feature in range(life.held.given * size, image.features):
            found = self.shadow.at(self.blocks.group, image.blocks[feature // size], feature % size)
            assert found == ("image", image.digest, feature), f"feature {feature} of {image.digest!r} is another's"

    def _needs(self, life: Seer) -> bool:
        if not self.any or life.image is None:
            return False
        return self.blocks.policy.stays or life.computed < FEATURES[life.image]
