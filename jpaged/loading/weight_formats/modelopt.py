"""Reads checkpoints of NVIDIA's ModelOpt in FP8 and NVFP4.

A matrix ``{name}.weight`` [outputs, inputs] lies as

- ``FP8`` and ``FP8_PER_CHANNEL_PER_TOKEN``: ``weight``, float8_e4m3fn, and ``weight_scale``, one number or one an
  output;
- ``NVFP4``: ``weight``, uint8 [outputs, inputs / 2], with two e2m1 codes a byte, the first in the low half;
  ``weight_scale``, float8 [outputs, inputs / 16]; ``weight_scale_2``, one number. Both scales multiply.

config.json says so in ``quantization_config``, or, in older exports, the file hf_quant_config.json in ``quantization``.
``input_scale`` is not applied, see `CodedFolder`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredMatrices
from jpaged.loading.weight_formats.float8 import float8_matrices
from jpaged.loading.weight_formats.settings import is_size, shown, texts
from jpaged.loading.weight_formats.stored_codes import Encoding
from jpaged.loading.weight_formats.stored_matrix import (
    NVFP4,
    NVFP4_GROUP,
    E2M1Matrix,
    MatricesByName,
    StoredMatrix,
    float8_encoding,
    owners,
)

_WEIGHT, _SCALES, _WHOLE = ".weight", ".weight_scale", ".weight_scale_2"
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")


class ModelOpt:
    """Describes the method ``modelopt``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: ``quant_algo`` or ``group_size`` is not read.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        said = fields.get("quant_algo")
        if said not in ALGORITHMS:
            raise ValueError(f"quant_algo={shown(said)} is none of {', '.join(ALGORITHMS)}, which are read")
        self._nvfp4 = said == "NVFP4"
        group = fields.get("group_size")
        if self._nvfp4 and group is not None and not (is_size(group) and group == NVFP4_GROUP):
            raise ValueError(f"group_size={shown(group)} is not {NVFP4_GROUP}, which NVFP4 has")
        self._plain = texts(fields, "exclude_modules") or texts(fields, "ignore")
        self.encoding = NVFP4 if self._nvfp4 else float8_encoding(None)

    def encoding_by_name(self, name: str) -> Encoding | None:
        module = name.removesuffix(_WEIGHT)
        plain = any(fnmatch.fnmatchcase(module, one) for one in self._plain)
        return self.encoding if name.endswith("_proj.weight") and not plain else None

    def matrices(self, weights: SafetensorsWeights) -> StoredMatrices:
        if not self._nvfp4:
            return float8_matrices(weights, (_SCALES,))
        found: dict[str, StoredMatrix] = {
            owner + _WEIGHT: E2M1Matrix(weights, owner + _WEIGHT, owner + _SCALES, owner + _WHOLE)
            for owner in owners(weights, _WHOLE, [_WEIGHT, _SCALES])
        }
        if not found:
            raise ValueError(f"{weights.location} is said to be in NVFP4, but no tensor's name ends in {_WHOLE}")
        return MatricesByName(found)
