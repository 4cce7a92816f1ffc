"""Unpacks small numbers that are stored in words of 32 bits, as GPTQ, AWQ and compressed-tensors do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def unpack_words(words: np.ndarray, bits: int, axis: int, order: Sequence[int] | None = None) -> np.ndarray:
    """Return the numbers of `bits` bits in int32 words, uint8, ``32 / bits`` times as many along `axis`.

    Args:
        order: the place in a word, from its lowest bits, of each of its numbers; by default the first is lowest.
    """
    places = np.arange(32 // bits) if order is None else np.asarray(order)
    wide = np.ascontiguousarray(np.moveaxis(words, axis, -1)).view(np.uint32)
    numbers = (wide[..., None] >> (places * bits).astype(np.uint32) & np.uint32(2**bits - 1)).astype(np.uint8)
    return np.moveaxis(numbers.reshape(*wide.shape[:-1], -1), -1, axis)
