"""Reads the blocks of GGUF encodings: as float32, or as codes with scales and minimums that hold the same values.

NumPy code decodes the commonest encodings to float32 for speed; `gguf` decodes the rest. Layouts of the blocks: ggml's
`block_q4_0` and so on (llama.cpp, ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import E2M1_PAIRS, INT8, UINT4_PAIRS


@dataclass(frozen=True)
class Coded:
    """Describes how an encoding's blocks are split into codes.

    Attributes:
        format: a format that holds them exactly.
        split: maps blocks, uint8 [blocks, bytes], to codes [blocks, values], scales and minimums [blocks, groups].
    """

    format: WeightFormat
    split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]]


def split_rows(rows: np.ndarray, encoding: GGMLQuantizationType) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Split quantised rows, uint8 [..., bytes of a row], into codes [..., values], scales and minimums [...,
    groups]."""
    _, block_bytes = GGML_QUANT_SIZES[encoding]
    codes, scales, minimums = CODED[encoding].split(rows.reshape(-1, block_bytes))
    shape = (*rows.shape[:-1], -1)
    return codes.reshape(shape), scales.reshape(shape), None if minimums is None else minimums.reshape(shape)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 number at byte `at` of every block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack [..., bytes] to [..., 2 * bytes], low nibbles first."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0), None


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split blocks of eight groups of 32: 6-bit scales and minimums in units of two float16 numbers, codes in four runs
    of 64."""
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 2) & 48], axis=1).astype(np.float32)
    minimums = np.concatenate([second & 63, (rest >> 4) | (second >> 2) & 48], axis=1).astype(np.float32)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return codes, scales * _halves(blocks, 0), -minimums * _halves(blocks, 2)


def _q6_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    """Split blocks of sixteen groups of 16: int8 scales in units of a float16 number, codes of 4 low and 2 high bits,
    less 32."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 1, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | high << 4).astype(np.int8) - np.int8(32)
    return codes, blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208), None


def _mxfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    return _nibbles(blocks[:, 1:]), blocks[:, :1], None


_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)

CODED: dict[GGMLQuantizationType, Coded] = {
    GGMLQuantizationType.Q8_0: Coded(WeightFormat(INT8, 32, _HALF), _q8_0),
    GGMLQuantizationType.Q4_0: Coded(WeightFormat(UINT4_PAIRS, 32, _HALF, minimums=True), _q4_0),
    GGMLQuantizationType.Q4_1: Coded(WeightFormat(UINT4_PAIRS, 32, _HALF, minimums=True), _q4_1),
    GGMLQuantizationType.Q4_K: Coded(WeightFormat(UINT4_PAIRS, 32, _SINGLE, minimums=True), _q4_k),
    GGMLQuantizationType.Q6_K: Coded(WeightFormat(INT8, 16, _SINGLE), _q6_k),
    GGMLQuantizationType.MXFP4: Coded(WeightFormat(E2M1_PAIRS, 32, np.dtype(np.uint8)), _mxfp4),
}
"""The encodings whose codes parameters can keep."""


_BLOCK = 32
_CHUNK_BLOCKS = 1 << 15
"""Blocks decoded at a time: the intermediate arrays (4 MiB) then stay in cache, and memory stays small."""


def dequantise(rows: np.ndarray, encoding: GGMLQuantizationType) -> np.ndarray:
    """Dequantise rows, uint8 [..., bytes of a row], to float32 [..., values of a row].

    Raises:
        ValueError: when the encoding is not known to the installed `gguf`.
    """
    if encoding == GGMLQuantizationType.Q4_1:
        return _by_chunks(rows, 20, _q4_1_values)
    if encoding == GGMLQuantizationType.Q8_0:
        return _by_chunks(rows, 34, _q8_0_values)
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


def _q4_1_values(blocks: np.ndarray, out: np.ndarray) -> None:
    """Decode blocks of a scale (f16), a minimum (f16) and 16 bytes whose low nibbles are values 0..15, the high ones
    16..31."""
    packed = blocks[:, 4:]
    np.bitwise_and(packed, 15, out=out[:, :16], casting="unsafe")
    np.right_shift(packed, 4, out=out[:, 16:], casting="unsafe")
    out *= _halves(blocks, 0).astype(np.float32)
    out += _halves(blocks, 2).astype(np.float32)


def _q8_0_values(blocks: np.ndarray, out: np.ndarray) -> None:
    """Decode blocks of a scale (f16) and 32 signed bytes."""
    np.multiply(blocks[:, 2:].view(np.int8), _halves(blocks, 0).astype(np.float32), out=out)
