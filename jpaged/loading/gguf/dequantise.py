"""Dequantises GGUF blocks with NumPy: the commonest encodings are written for speed, the rest come from `gguf`."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGMLQuantizationType

_BLOCK = 32
_CHUNK_BLOCKS = 1 << 15
"""Blocks decoded at a time: the intermediate arrays (4 MiB) then stay in cache, and memory stays small."""


def dequantise(rows: np.ndarray, encoding: GGMLQuantizationType) -> np.ndarray:
    """Dequantise rows, uint8 [..., bytes of a row], to float32 [..., values of a row].

    Raises:
        ValueError: when the encoding is not known to the installed `gguf`.
    """
    if encoding == GGMLQuantizationType.Q4_1:
        return _by_chunks(rows, 20, _q4_1)
    if encoding == GGMLQuantizationType.Q8_0:
        return _by_chunks(rows, 34, _q8_0)
    from gguf.quants import dequantize

    try:
        return dequantize(rows, encoding)
    except NotImplementedError as error:
        raise ValueError(f"GGUF encoding {encoding.name} cannot be dequantised") from error


def _by_chunks(rows, block_bytes, decode) -> np.ndarray:
    blocks = rows.reshape(-1, block_bytes)
    values = np.empty((len(blocks), _BLOCK), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        part = slice(start, start + _CHUNK_BLOCKS)
        decode(blocks[part], values[part])
    return values.reshape(*rows.shape[:-1], -1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 number at byte `at` of every block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Decode blocks of a scale (f16), a minimum (f16) and 16 bytes whose low nibbles are values 0..15, the high ones
    16..31."""
    packed = blocks[:, 4:]
    np.bitwise_and(packed, 15, out=out[:, :16], casting="unsafe")
    np.right_shift(packed, 4, out=out[:, 16:], casting="unsafe")
    out *= _halves(blocks, 0)
    out += _halves(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Decode blocks of a scale (f16) and 32 signed bytes."""
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0), out=out)
