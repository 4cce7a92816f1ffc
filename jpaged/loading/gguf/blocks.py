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
from pallas_kernels.quantised import E2M1_PAIRS, INT8, IQ4_PAIRS, UINT4_PAIRS


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


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the fifth bits, 0 or 16, of 32 codes, whose bits lie in the four bytes from `at` on."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return codes.view(np.int8) - np.int8(16), _halves(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes.view(np.int8), _halves(blocks, 0), _halves(blocks, 2)


def _q5_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split blocks like those of Q4_K; the fifth bits of group n are bit n of 32 bytes."""
    low, scales, minimums = _q4_k(np.concatenate([blocks[:, :16], blocks[:, 48:]], axis=1))
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = low.reshape(-1, 8, 32) | high << 4
    return codes.reshape(len(blocks), -1).view(np.int8), scales, minimums


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack [blocks, 64] bytes to 256 numbers of two bits: a half has four runs of 32, lowest bits first."""
    runs = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return runs.reshape(len(packed), -1)


def _q2_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split blocks of sixteen groups of 16: scales and minimums of 4 bits in units of two float16 numbers."""
    packed = blocks[:, :16]
    scales = (packed & 15).astype(np.float32) * _halves(blocks, 80)
    return _pairs_of_bits(blocks[:, 16:80]), scales, -((packed >> 4).astype(np.float32) * _halves(blocks, 82))


def _q3_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split blocks of sixteen groups of 16: scales of 6 bits, less 32, in units of a float16 number; codes of 2 bits
    and a third, bit n of 32 bytes for the n-th run of 32. A code counts from -4."""
    high = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _pairs_of_bits(blocks[:, 32:96]) | high.reshape(len(blocks), -1) << 2
    low = _nibbles(blocks[:, 96:104])
    top = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(len(blocks), -1)
    scales = ((low | top << 4).astype(np.float32) - 32) * _halves(blocks, 108)
    return codes, scales, -4 * scales


def _iq4_nl(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _iq4_xs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    """Split blocks of eight groups of 32: scales of 4 low and 2 high bits, less 32, in units of a float16 number."""
    top = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(len(blocks), -1)
    scales = ((low | top << 4).astype(np.float32) - 32) * _halves(blocks, 0)
    return _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(len(blocks), -1), scales, None


_HALF, _SINGLE = np.dtype(np.float16), np.dtype(np.float32)

CODED: dict[GGMLQuantizationType, Coded] = {
    GGMLQuantizationType.Q8_0: Coded(WeightFormat(INT8, 32, _HALF), _q8_0),
    GGMLQuantizationType.Q4_0: Coded(WeightFormat(UINT4_PAIRS, 32, _HALF, minimums=True), _q4_0),
    GGMLQuantizationType.Q4_1: Coded(WeightFormat(UINT4_PAIRS, 32, _HALF, minimums=True), _q4_1),
    GGMLQuantizationType.Q4_K: Coded(WeightFormat(UINT4_PAIRS, 32, _SINGLE, minimums=True), _q4_k),
    GGMLQuantizationType.Q6_K: Coded(WeightFormat(INT8, 16, _SINGLE), _q6_k),
    GGMLQuantizationType.Q5_0: Coded(WeightFormat(INT8, 32, _HALF), _q5_0),
    GGMLQuantizationType.Q5_1: Coded(WeightFormat(INT8, 32, _HALF, minimums=True), _q5_1),
    GGMLQuantizationType.Q5_K: Coded(WeightFormat(INT8, 32, _SINGLE, minimums=True), _q5_k),
    GGMLQuantizationType.Q3_K: Coded(WeightFormat(UINT4_PAIRS, 16, _SINGLE, minimums=True), _q3_k),
    GGMLQuantizationType.Q2_K: Coded(WeightFormat(UINT4_PAIRS, 16, _SINGLE, minimums=True), _q2_k),
    GGMLQuantizationType.IQ4_NL: Coded(WeightFormat(IQ4_PAIRS, 32, _HALF), _iq4_nl),
    GGMLQuantizationType.IQ4_XS: Coded(WeightFormat(IQ4_PAIRS, 32, _SINGLE), _iq4_xs),
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
