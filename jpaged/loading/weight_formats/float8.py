"""Reads checkpoints in float8, as DeepSeek-V3, Qwen3, Ministral 3 and Llama 3.1 405B are published.

A matrix ``{name}.weight`` [outputs, inputs] is float8_e4m3fn. What multiplies it is

- with ``weight_block_size``: ``{name}.weight_scale_inv`` [ceil(outputs / 128), ceil(inputs / 128)], a scale a block
  (DeepSeek-V3, 2024, section 3.3). Blocks at the edges may be smaller;
- else ``{name}.weight_scale`` or ``{name}.weight_scale_inv``: one number, or one an output;
- with the method ``fbgemm_fp8``: ``{name}.weight_scale`` [outputs, 1].

Matrices without such scales are plain. Static scales of activations are not applied, see `CodedFolder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredMatrices
from jpaged.loading.weight_formats.settings import is_size, shown, texts
from jpaged.loading.weight_formats.stored_codes import Encoding
from jpaged.loading.weight_formats.stored_matrix import Float8Matrix, MatricesByName, StoredMatrix, float8_encoding

_WEIGHT = ".weight"
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


class FP8:
    """Describes the method ``fp8``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: ``weight_block_size`` is no pair of numbers.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        block = fields.get("weight_block_size")
        self.block: tuple[int, int] | None = None
        if block is not None:
            if not (isinstance(block, Sequence) and len(block) == 2 and all(map(is_size, block))):
                raise ValueError(
                    f"weight_block_size={shown(block)} is not [outputs, inputs] of a block, such as [128, 128]"
                )
            self.block = (int(block[0]), int(block[1]))
        kind = fields.get("fmt") or "e4m3"
        if kind not in ("e4m3", "float8_e4m3fn"):
            raise ValueError(f"fmt={shown(kind)} is not e4m3, which is read")
        self._plain = texts(fields, "modules_to_not_convert")
        self.encoding = float8_encoding(self.block)

    def encoding_by_name(self, name: str) -> Encoding | None:
        plain = any(name.removesuffix(_WEIGHT) == one or name.startswith(f"{one}.") for one in self._plain)
        return self.encoding if name.endswith("_proj.weight") and not plain else None

    def matrices(self, weights: SafetensorsWeights) -> StoredMatrices:
        if self.block is not None:
            return float8_matrices(weights, (".weight_scale_inv",), self.block)
        return float8_matrices(weights, (".weight_scale", ".weight_scale_inv"))


class FBGEMM(FP8):
    """Describes the method ``fbgemm_fp8``, with a scale an output."""

    def __init__(self, fields: Mapping[str, Any]):
        super().__init__({"modules_to_not_convert": fields.get("modules_to_not_convert")})


def float8_matrices(
    weights: SafetensorsWeights, endings: Sequence[str], block: tuple[int, int] | None = None
) -> MatricesByName:
    """Return the float8 matrices of a folder.

    Args:
        endings: of the names of scales, any of which a matrix may have.

    Raises:
        ValueError: a matrix has no scales, or scales no matrix; names file and tensor.
    """
    there = set(weights.names())
    found: dict[str, StoredMatrix] = {}
    for name in sorted(there):
        ending = next((one for one in endings if name.endswith(one)), None)
        if ending is not None:
            matrix = name.removesuffix(ending) + _WEIGHT
            if matrix not in there:
                raise ValueError(f"{weights.file_of(name)} has {name}, but there is no {matrix}")
            if weights.held_dtype(matrix) != _FLOAT8:
                kind = weights.held_dtype(matrix)
                raise ValueError(f"{weights.file_of(matrix)}: {matrix} is {kind}, not float8_e4m3fn, but has {name}")
        elif weights.held_dtype(name) == _FLOAT8:
            of_matrix = [name.removesuffix(_WEIGHT) + ending for ending in endings]
            scales = next((one for one in of_matrix if one in there), None)
            if not name.endswith(_WEIGHT) or scales is None:
                raise ValueError(f"{weights.file_of(name)}: {name} is float8, but there is no {' or '.join(of_matrix)}")
            found[name] = Float8Matrix(weights, name, scales, block)
    if not found:
        raise ValueError(f"{weights.location} is said to be in float8, but no tensor is float8_e4m3fn")
    return MatricesByName(found)
