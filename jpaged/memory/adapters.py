"""Which blocks hold which low-rank adapter: all of its blocks are there or none, shared by those who run with it.

An adapter is kept as an image's features are (`jpaged.memory.images`): found by its digest, held by running requests,
evictable with all of its blocks at once when nobody holds it, and read back from the host when it is wanted again.
"""

from __future__ import annotations

from typing import ClassVar

from jpaged.memory.images import HeldImage, ImageBlocks, StoredImage
from jpaged.memory.policies import Adapters, Policy

StoredAdapter = StoredImage
"""An adapter in the pool; its `features` are its blocks, and it `is_encoded` once the device was told to load it."""

HeldAdapter = HeldImage
"""One request's hold on an adapter."""


class AdapterBlocks(ImageBlocks):
    """Blocks of adapters by digest; see `ImageBlocks` for its arguments and methods."""

    policy: ClassVar[type[Policy]] = Adapters
    refusal: ClassVar[str] = "no layer group keeps adapters"

    def forget(self, digest: bytes) -> None:
        """Give up the blocks of an adapter that nobody holds: they may lie scattered over large pages."""
        image = self._images.get(digest)
        if image is not None and not image.users:
            self._forget(image)
            self._sweep()
