"""Reads checkpoints that AWQ quantised (Lin et al., 2023), in the ``gemm`` layout of AutoAWQ.

A matrix ``{name}.weight`` [outputs, inputs] lies as

- ``{name}.qweight``, int32 [inputs, outputs / 8]: a word holds eight neighbouring outputs of 4 bits, from the lowest
  bits those of the places 0, 2, 4, 6, 1, 3, 5, 7;
- ``{name}.qzeros``, int32 [groups, outputs / 8]: zero points, packed likewise;
- ``{name}.scales`` [groups, outputs].

A value is ``(code - zero) * scale``, held as GPTQ's are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes, check_part
from jpaged.loading.weight_formats.settings import flag, inputs_of_group, is_size, shown, texts
from jpaged.loading.weight_formats.stored_codes import Encoding, unpack_words
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import UINT4_PAIRS

_WEIGHT, _CODES, _SCALES, _ZEROS = ".weight", ".qweight", ".scales", ".qzeros"
_FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32)
_BITS, _A_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, from its lowest bits, of each of its eight outputs."""


class AWQ:
    """Describes the method ``awq``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: a field has a value that is not read.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        bits, group = fields.get("bits", fields.get("w_bit")), fields.get("group_size", fields.get("q_group_size"))
        if not is_size(bits) or bits != _BITS:
            raise ValueError(f"bits={shown(bits)} is not {_BITS}, which is read")
        version = str(fields.get("version", "gemm")).lower()
        if version != "gemm":
            way = ": convert it to gemm, or take one in GPTQ" if version.startswith("gemv") else ""
            raise ValueError(f"version={shown(version)} is not gemm, which is read{way}")
        if not flag(fields, "zero_point", True):
            raise ValueError("zero_point=False is not read: AWQ's zero points are")
        self._plain = texts(fields, "modules_to_not_convert")
        self.group = inputs_of_group(group, may_be_all=True)
        held = WeightFormat(UINT4_PAIRS, self.group, np.dtype(np.float32), minimums=True, rounds_rows=False)
        self.encoding = Encoding("AWQ in 4 bits", held)

    def encoding_by_name(self, name: str) -> Encoding | None:
        plain = any(part in name for part in self._plain)
        return self.encoding if name.endswith("_proj.weight") and not plain else None

    def matrices(self, weights: SafetensorsWeights) -> AWQMatrices:
        return AWQMatrices(weights, self)


class AWQMatrices:
    """Reads matrices that AWQ quantised; see `StoredMatrices`."""

    inputs_last = True

    def __init__(self, weights: SafetensorsWeights, method: AWQ):
        self._weights, self._method = weights, method

    def find(self) -> dict[str, Sequence[str]]:
        weights, there = self._weights, set(self._weights.names())
        found: dict[str, Sequence[str]] = {}
        for name in sorted(there):
            if not name.endswith(_CODES):
                continue
            owner = name.removesuffix(_CODES)
            for part in (_SCALES, _ZEROS):
                if owner + part not in there:
                    raise ValueError(f"{weights.file_of(name)} has {name}, but there is no {owner + part}")
            check_part(weights, name, None, (np.int32,))
            inputs, words = weights.shape(name)
            groups = -(-inputs // (self._method.group or inputs))
            check_part(weights, owner + _SCALES, (groups, words * _A_WORD), _FLOATS)
            check_part(weights, owner + _ZEROS, (groups, words), (np.int32,))
            found[owner + _WEIGHT] = [owner + part for part in (_CODES, _SCALES, _ZEROS)]
        if not found:
            raise ValueError(f"{weights.location} is said to be in AWQ, but no tensor's name ends in {_CODES}")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        inputs, words = self._weights.shape(name.removesuffix(_WEIGHT) + _CODES)
        return words * _A_WORD, inputs

    def encoding(self, name: str) -> Encoding:
        return self._method.encoding

    def read(self, name: str) -> StoredCodes:
        owner = name.removesuffix(_WEIGHT)
        codes, zeros = (
            unpack_words(self._weights.read_codes(owner + part), _BITS, axis=1, order=_PLACES).T
            for part in (_CODES, _ZEROS)
        )
        scales = self._weights.read_codes(owner + _SCALES).astype(np.float32).T
        assert self._method.encoding.format is not None
        return StoredCodes(codes, scales, -zeros.astype(np.float32) * scales, self._method.encoding.format)
