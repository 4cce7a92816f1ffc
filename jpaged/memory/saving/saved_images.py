"""Which blocks hold which images, as plain data, and back.

Who holds an image is not among it: a request that goes on asks for its image when its next tokens need it, as one that
comes back from swapping does. Then it finds the image cached, or has it encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jpaged.memory.images import HeldImage, ImageBlocks, StoredImage


def images_data(images: ImageBlocks) -> dict[str, Any]:
    """Return the group that images lie in, every image, and how many blocks each of those who hold one has given up."""
    stored = list(dict.fromkeys([*images.cached, *(held.image for held in images.held)]))
    numbers = {id(image): number for number, image in enumerate(stored)}
    return {
        "group": images.group,
        "stored": [[one.digest, one.features, list(one.blocks), one.is_encoded, one.is_torn] for one in stored],
        "held": [[numbers[id(held.image)], held.given] for held in images.held],
    }


def load_images(images: ImageBlocks, data: Mapping[str, Any]) -> None:
    """Tell fresh books of images what was saved, those who hold some included: blocks are counted by them."""
    stored = [
        StoredImage(digest, features, list(blocks), is_encoded=is_encoded, is_torn=is_torn)
        for digest, features, blocks, is_encoded, is_torn in data["stored"]
    ]
    holds = [HeldImage(stored[number], given) for number, given in data["held"]]
    images.restore(stored, holds)


def blocks_with_content(data: Mapping[str, Any]) -> dict[int, bytes]:
    """Return the name of what each block holds, of images that can be found."""
    return {
        block: digest + place.to_bytes(4, "little")
        for digest, _, blocks, is_encoded, is_torn in data["stored"]
        for place, block in enumerate(blocks)
        if is_encoded and not is_torn
    }
