"""Puts the patches of tiles together again."""

from __future__ import annotations

import numpy as np


def pixels_of(arrays, patch: int) -> np.ndarray:
    """Return the tiles, [tiles, 3, height, width], whose patches (without tokens of the class) an item's arrays are."""
    scale, shift, places = arrays["scale"][:, None], arrays["shift"][:, None], arrays["places"]
    patches = arrays["pixels"].reshape(len(places), 3, -1) * scale + shift
    side = int((places.max() + 1) ** 0.5)
    tiles = np.zeros((len(arrays["tiles"]), side, side, 3, patch, patch), np.float32)
    each = arrays["tiles"][0]
    for number, place in enumerate(places):
        tiles[number // each, place // side, place % side] = patches[number].reshape(3, patch, patch)
    return tiles.transpose(0, 3, 1, 4, 2, 5).reshape(len(tiles), 3, side * patch, side * patch)
