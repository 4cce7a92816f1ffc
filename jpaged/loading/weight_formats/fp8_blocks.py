"""Reads checkpoints in float8 whose scales belong to blocks of 128 x 128, as DeepSeek-V3 and Qwen3 are published.

A matrix ``{name}.weight`` [outputs, inputs] is float8_e4m3fn; ``{name}.weight_scale_inv`` [ceil(outputs / 128),
ceil(inputs / 128)] multiplies its blocks (DeepSeek-V3, 2024, section 3.3). Blocks at the edges may be smaller. Matrices
without such scales are plain.

Codes are held as `FLOAT8` with a scale for each output and 128 inputs: a block's scale is repeated for its outputs,
which takes a 32nd of the codes' memory and lets fused, padded and sharded matrices cut blocks anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes
from jpaged.loading.weight_formats.stored_codes import Encoding
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import FLOAT8

_WEIGHT, _SCALES = ".weight", ".weight_scale_inv"
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


class FP8Blocks:
    """Describes the method ``fp8`` with ``weight_block_size``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: the scales belong to anything else than blocks.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        block = fields.get("weight_block_size")
        if not (isinstance(block, Sequence) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise ValueError(f"weight_block_size={block!r} is not [outputs, inputs] of a block, such as [128, 128]")
        self.block = (int(block[0]), int(block[1]))
        self._plain = tuple(fields.get("modules_to_not_convert") or ())
        held = WeightFormat(FLOAT8, self.block[1], np.dtype(np.float32), rounds_rows=False)
        self.encoding = Encoding(f"float8 in blocks of {self.block[0]} x {self.block[1]}", held)

    def encoding_by_name(self, name: str) -> Encoding | None:
        plain = any(name.removesuffix(_WEIGHT) == one or name.startswith(f"{one}.") for one in self._plain)
        return self.encoding if name.endswith("_proj.weight") and not plain else None

    def matrices(self, weights: SafetensorsWeights) -> FP8Matrices:
        return FP8Matrices(weights, self.block, self.encoding)


class FP8Matrices:
    """Reads matrices with a scale a block; see `StoredMatrices`."""

    inputs_last = True

    def __init__(self, weights: SafetensorsWeights, block: tuple[int, int], encoding: Encoding):
        self._weights, self._block, self._encoding = weights, block, encoding

    def find(self) -> dict[str, Sequence[str]]:
        weights = self._weights
        found: dict[str, Sequence[str]] = {}
        there = set(weights.names())
        for name in sorted(there):
            if name.endswith(_SCALES):
                matrix = name.removesuffix(_SCALES) + _WEIGHT
                if matrix not in there:
                    raise ValueError(f"{weights.file_of(name)} has {name}, but there is no {matrix}")
                if weights.held_dtype(matrix) != _FLOAT8:
                    kind = weights.held_dtype(matrix)
                    raise ValueError(
                        f"{weights.file_of(matrix)}: {matrix} is {kind}, not float8_e4m3fn, but has {name}"
                    )
            elif weights.held_dtype(name) == _FLOAT8:
                scales = name.removesuffix(_WEIGHT) + _SCALES
                if not name.endswith(_WEIGHT) or scales not in there:
                    raise ValueError(f"{weights.file_of(name)}: {name} is float8, but there is no {scales}")
                self._check(name, scales)
                found[name] = (name, scales)
        if not found:
            raise ValueError(f"{weights.location} is said to be in float8, but no tensor is float8_e4m3fn")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def encoding(self, name: str) -> Encoding:
        return self._encoding

    def read(self, name: str) -> StoredCodes:
        codes = self._weights.read_codes(name)
        scales = self._weights.read_codes(name.removesuffix(_WEIGHT) + _SCALES).astype(np.float32)
        by_output = np.repeat(scales, self._block[0], axis=0)[: len(codes)]
        assert self._encoding.format is not None
        return StoredCodes(codes, by_output, None, self._encoding.format)

    def _check(self, name: str, scales: str) -> None:
        weights = self._weights
        shape, dtype = weights.shape(name), weights.held_dtype(scales)
        wanted = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if len(shape) != 2 or weights.shape(scales) != wanted:
            raise ValueError(
                f"{weights.file_of(scales)}: {scales} has shape {weights.shape(scales)}; {name} of shape {shape} in "
                f"blocks of {self._block} needs {wanted}"
            )
        if dtype not in (np.float32, ml_dtypes.bfloat16):
            raise ValueError(f"{weights.file_of(scales)}: {scales} is {dtype}, not float32 or bfloat16")
