"""Puts matrices into the order of a CPU's tiles: 16 outputs by as many inputs as have 4 bytes.

A tile's 4 bytes of an output are moved as one number, so that packing is a transposition of 16 lines at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

OUTPUTS = 16
"""Outputs of a tile."""
_CHUNK_BYTES = 1 << 19
"""Bytes of a matrix that are packed at once: they are read twice, the second time from the cache."""


def columns_at_once(inputs: int, outputs: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of outputs that are packed one after another, each but the last of whole panels."""
    size = max(1, _CHUNK_BYTES // (max(1, inputs) * OUTPUTS)) * OUTPUTS
    for start in range(0, outputs, size):
        yield start, min(start + size, outputs)


def fill_tiles(tiles: np.ndarray, lines: np.ndarray, nothing: int = 0) -> None:
    """Put the lines of some outputs into their tiles.

    Args:
        tiles: [panels, tiles of a panel, 16, numbers of 4 bytes], all of it is written.
        lines: [outputs, inputs] in the tiles' dtype, in any order of memory.
        nothing: what stands beyond the matrix.
    """
    panels, across, _, numbers = tiles.shape
    outputs, inputs = lines.shape
    if (outputs, inputs) != (panels * OUTPUTS, across * numbers):
        padded = np.full((panels * OUTPUTS, across * numbers), nothing, tiles.dtype)
        padded[:outputs, :inputs] = lines
        lines = padded
    target = tiles.reshape(panels, across, OUTPUTS * numbers).view(np.uint32)
    if lines.strides[0] == lines.itemsize:
        # Outputs are contiguous: join numbers a whole row at a time.
        words = _joined(lines.T, numbers)
        np.copyto(target, words.reshape(across, panels, OUTPUTS).swapaxes(0, 1))
        return
    words = np.ascontiguousarray(lines).view(np.uint32).reshape(panels, OUTPUTS, across)
    np.copyto(target, words.swapaxes(1, 2))


def _joined(rows: np.ndarray, numbers: int) -> np.ndarray:
    """Return neighbouring rows' numbers [rows, outputs] joined to words [rows / numbers, outputs], the first lowest."""
    bits = 8 * rows.itemsize
    words = rows[::numbers].astype(np.uint32)
    for place in range(1, numbers):
        words |= rows[place::numbers].astype(np.uint32) << np.uint32(bits * place)
    return words
