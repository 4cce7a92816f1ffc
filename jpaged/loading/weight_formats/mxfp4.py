"""Reads checkpoints whose matrices are stored in MXFP4, as OpenAI publishes GPT-OSS.

A matrix of experts ``{name}`` [experts, inputs, outputs] lies as two tensors of bytes: ``{name}_blocks`` [experts,
outputs, groups, 16] has two codes a byte, the first in the low half, and ``{name}_scales`` [experts, outputs, groups]
the exponent, plus 127, of the power of two that 32 inputs share (OCP Microscaling Formats 1.0, 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes, check_part
from jpaged.loading.weight_formats.stored_codes import Encoding
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import E2M1_PAIRS

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
_OF_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
_FORMAT = WeightFormat(E2M1_PAIRS, _GROUP, np.dtype(np.uint8))
_ENCODING = Encoding("MXFP4", _FORMAT)


class MXFP4:
    """Describes the method ``mxfp4``; see `jpaged.loading.weight_formats.methods.Method`."""

    families: Sequence[str] | None = ("gpt_oss",)

    def __init__(self, fields: Mapping[str, Any] | None = None):
        pass  # transformers writes no field that matters here

    def encoding_by_name(self, name: str) -> Encoding | None:
        return _ENCODING if name.endswith(_OF_EXPERTS) else None

    def matrices(self, weights: SafetensorsWeights) -> MXFP4Matrices:
        return MXFP4Matrices(weights)


class MXFP4Matrices:
    """Reads the matrices of experts; see `StoredMatrices`."""

    inputs_last = False

    def __init__(self, weights: SafetensorsWeights):
        self._weights = weights

    def find(self) -> dict[str, Sequence[str]]:
        there = set(self._weights.names())
        matrices = sorted(name.removesuffix(_BLOCKS) for name in there if name.endswith(_BLOCKS))
        if not matrices:
            raise ValueError(f"{self._weights.location} is said to be in MXFP4, but no tensor's name ends in {_BLOCKS}")
        for name in matrices:
            self._check(name, there)
        return {name: (name + _BLOCKS, name + _SCALES) for name in matrices}

    def shape(self, name: str) -> tuple[int, ...]:
        experts, outputs, groups, _ = self._weights.shape(name + _BLOCKS)
        return experts, outputs, groups * _GROUP

    def encoding(self, name: str) -> Encoding:
        return _ENCODING

    def read(self, name: str) -> StoredCodes:
        blocks = self._weights.read_codes(name + _BLOCKS)
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
        codes = codes.reshape(*blocks.shape[:2], -1)
        return StoredCodes(codes, self._weights.read_codes(name + _SCALES).view(np.uint8), None, _FORMAT)

    def _check(self, name: str, there: set[str]) -> None:
        if name + _SCALES not in there:
            raise ValueError(f"{self._weights.location} has {name + _BLOCKS}, but no {name + _SCALES}")
        blocks, scales = (self._weights.shape(name + kind) for kind in (_BLOCKS, _SCALES))
        if blocks != (*scales, _GROUP // 2) or len(scales) != 3:
            raise ValueError(
                f"{self._weights.location}: {name + _BLOCKS} of shape {blocks} and {name + _SCALES} of shape {scales} "
                f"are no [experts, outputs, groups, {_GROUP // 2}] with [experts, outputs, groups]"
            )
        check_part(self._weights, name + _BLOCKS, blocks, (np.uint8,))
        check_part(self._weights, name + _SCALES, scales, (np.uint8, ml_dtypes.float8_e8m0fnu))
