"""Reads checkpoints of compressed-tensors in its format ``pack-quantized``: W4A16 and W8A16, as llm-compressor writes.

A matrix ``{name}.weight`` [outputs, inputs] lies as

- ``{name}.weight_packed``, int32 [outputs, inputs * bits / 32]: a word holds neighbouring inputs, the first in its
  lowest bits, each plus ``2 ** (bits - 1)``;
- ``{name}.weight_scale`` [outputs, groups];
- ``{name}.weight_shape``, int64 [2].

A value is ``code * scale``. Only symmetric weights are read, in groups of neighbours or with one scale an output. A
``kv_cache_scheme`` is logged and not applied: `kv_cache_dtype` chooses how keys and values are held.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes, check_part
from jpaged.loading.weight_formats.stored_codes import Encoding, unpack_words
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import INT8, UINT4_PAIRS

_WEIGHT, _CODES, _SCALES, _SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"
_FLOATS = (np.float16, ml_dtypes.bfloat16, np.float32)
_BITS = (4, 8)

logger = logging.getLogger(__name__)


class CompressedTensors:
    """Describes the method ``compressed-tensors``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: a field has a value that is not read.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        if fields.get("format") != "pack-quantized":
            raise ValueError(f"format={fields.get('format')!r} is not pack-quantized, which is read")
        groups = list((fields.get("config_groups") or {}).values())
        if len(groups) != 1:
            raise ValueError(f"config_groups has {len(groups)} groups; one is read")
        for part in ("input_activations", "output_activations"):
            if groups[0].get(part) is not None:
                raise ValueError(f"config_groups has {part}: quantised activations are not read")
        if fields.get("transform_config"):
            raise ValueError("transform_config rotates activations while the model runs, which is not read")
        sparsity = (fields.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise ValueError(f"sparsity_config has format={sparsity!r}; dense is read")
        weights = groups[0].get("weights") or {}
        bits = weights.get("num_bits")
        if bits not in _BITS or weights.get("type", "int") != "int":
            known = ", ".join(map(str, _BITS))
            raise ValueError(f"type={weights.get('type')!r}, num_bits={bits!r} is no int of {known} bits")
        if not weights.get("symmetric", True):
            raise ValueError("symmetric=False is not read")
        if weights.get("actorder") not in (None, False, "weight", "static"):
            raise ValueError(f"actorder={weights['actorder']!r} is not read: groups must be neighbours")
        strategy = weights.get("strategy")
        if strategy not in ("group", "channel"):
            raise ValueError(f"strategy={strategy!r} is neither group nor channel, which are read")
        self.kv_cache_scheme = fields.get("kv_cache_scheme")
        self.bits: int = bits
        self.group = int(weights["group_size"]) if strategy == "group" else 0
        four = self.bits == 4
        held = WeightFormat(UINT4_PAIRS if four else INT8, self.group, np.dtype(np.float32), minimums=four)
        self.encoding = Encoding(f"pack-quantized in {self.bits} bits", replace(held, rounds_rows=False))

    def encoding_by_name(self, name: str) -> Encoding | None:
        return self.encoding if name.endswith("_proj.weight") else None

    def matrices(self, weights: SafetensorsWeights) -> PackedMatrices:
        if self.kv_cache_scheme is not None:
            logger.warning(
                "%s: kv_cache_scheme=%s is not applied; kv_cache_dtype chooses how keys and values are held",
                weights.location,
                self.kv_cache_scheme,
            )
        return PackedMatrices(weights, self)


class PackedMatrices:
    """Reads packed matrices; see `StoredMatrices`."""

    inputs_last = True

    def __init__(self, weights: SafetensorsWeights, method: CompressedTensors):
        self._weights, self._method = weights, method

    def find(self) -> dict[str, Sequence[str]]:
        weights, method, there = self._weights, self._method, set(self._weights.names())
        found: dict[str, Sequence[str]] = {}
        for name in sorted(there):
            if not name.endswith(_CODES):
                continue
            owner = name.removesuffix(_CODES)
            for part in (_SCALES, _SHAPE):
                if owner + part not in there:
                    raise ValueError(f"{weights.file_of(name)} has {name}, but there is no {owner + part}")
            check_part(weights, owner + _SHAPE, (2,), (np.int64,))
            outputs, inputs = self.shape(owner + _WEIGHT)
            check_part(weights, name, (outputs, -(-inputs * method.bits // 32)), (np.int32,))
            check_part(weights, owner + _SCALES, (outputs, -(-inputs // (method.group or inputs))), _FLOATS)
            found[owner + _WEIGHT] = [owner + part for part in (_CODES, _SCALES, _SHAPE)]
        if not found:
            raise ValueError(f"{weights.location} is said to be packed, but no tensor's name ends in {_CODES}")
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(map(int, self._weights.read_codes(name.removesuffix(_WEIGHT) + _SHAPE)))

    def encoding(self, name: str) -> Encoding:
        return self._method.encoding

    def read(self, name: str) -> StoredCodes:
        owner, method = name.removesuffix(_WEIGHT), self._method
        codes = unpack_words(self._weights.read_codes(owner + _CODES), method.bits, axis=1)[:, : self.shape(name)[1]]
        scales = self._weights.read_codes(owner + _SCALES).astype(np.float32)
        assert method.encoding.format is not None
        if method.bits == 4:
            return StoredCodes(codes, scales, -8 * scales, method.encoding.format)
        return StoredCodes((codes ^ np.uint8(128)).view(np.int8), scales, None, method.encoding.format)
