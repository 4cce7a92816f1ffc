"""Reads checkpoints of bitsandbytes: NF4 and FP4 (Dettmers et al., 2023), and LLM.int8 (Dettmers et al., 2022).

With 4 bits a matrix ``{name}.weight`` [outputs, inputs] lies as

- ``weight``, uint8 [values / 2, 1]: two codes a byte, the first in the high half, in the order of rows;
- ``weight.absmax``: what multiplies each run of ``blocksize`` values, which may cross rows;
- ``weight.quant_map``, float32 [16]: the number of each code;
- ``weight.quant_state.bitsandbytes__nf4`` (or ``fp4``): uint8, the JSON of blocksize, shape and so on;
- double quantised, ``weight.absmax`` are codes, uint8, of ``weight.nested_quant_map`` [256], which ``nested_absmax``
  multiplies in runs of ``nested_blocksize``, plus ``nested_offset``.

With 8 bits it lies as ``weight``, int8, and ``SCB``, float32 [outputs]: 127 times what multiplies. LLM.int8 computes
columns with large activations in float16 and rounds other activations to 8 bits; here no activation is rounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.weight_formats.coded_folder import StoredCodes, check_part
from jpaged.loading.weight_formats.settings import flag, is_size, shown, texts
from jpaged.loading.weight_formats.stored_codes import Encoding
from jpaged.loading.weight_formats.stored_matrix import FLOATS, MatricesByName, StoredMatrix, owners
from jpaged.loading.weight_formats.weight_format import WeightFormat
from pallas_kernels.quantised import FP4_PAIRS, FP4_VALUES, INT8, NF4_PAIRS, NF4_VALUES

_WEIGHT, _SCB, _ABSMAX, _MAP = ".weight", ".SCB", ".weight.absmax", ".weight.quant_map"
_STATE = ".weight.quant_state.bitsandbytes__"
_NESTED, _NESTED_MAP = ".weight.nested_absmax", ".weight.nested_quant_map"
_KINDS = {"nf4": (NF4_PAIRS, NF4_VALUES), "fp4": (FP4_PAIRS, FP4_VALUES)}
_SINGLE = np.dtype(np.float32)
_BLOCK = 64
_INT8 = Encoding("LLM.int8", WeightFormat(INT8, 0, _SINGLE, rounds_rows=False))


class BitsAndBytes:
    """Describes the method ``bitsandbytes``; see `jpaged.loading.weight_formats.methods.Method`.

    Raises:
        ValueError: the config says neither 4 nor 8 bits, or a kind of 4 bits that is not read.
    """

    families: Sequence[str] | None = None

    def __init__(self, fields: Mapping[str, Any]):
        self.four = flag(fields, "load_in_4bit", flag(fields, "_load_in_4bit"))
        eight = flag(fields, "load_in_8bit", flag(fields, "_load_in_8bit"))
        if self.four == eight:
            raise ValueError(f"load_in_4bit={self.four}, load_in_8bit={eight}: one of them must be true")
        kind = fields.get("bnb_4bit_quant_type") or "fp4"
        if self.four and not (isinstance(kind, str) and kind in _KINDS):
            raise ValueError(f"bnb_4bit_quant_type={shown(kind)} is none of {', '.join(_KINDS)}, which are read")
        self._plain = texts(fields, "llm_int8_skip_modules")
        self.encoding = four_bit_encoding(kind, _BLOCK) if self.four else _INT8

    def encoding_by_name(self, name: str) -> Encoding | None:
        module = name.removesuffix(_WEIGHT)
        plain = any(module == one or module.startswith(f"{one}.") or one in module.split(".") for one in self._plain)
        return self.encoding if name.endswith("_proj.weight") and not plain else None

    def matrices(self, weights: SafetensorsWeights) -> MatricesByName:
        ending = _ABSMAX if self.four else _SCB
        found: dict[str, StoredMatrix] = {}
        for owner in owners(weights, ending, [_WEIGHT, *([_MAP] if self.four else [])]):
            found[owner + _WEIGHT] = FourBitMatrix(weights, owner) if self.four else Int8Matrix(weights, owner)
        if not found:
            raise ValueError(f"{weights.location} is said to be of bitsandbytes, but no tensor's name ends in {ending}")
        return MatricesByName(found)


def four_bit_encoding(kind: str, group: int) -> Encoding:
    """Return how a matrix is held.

    Args:
        kind: "nf4" or "fp4".
        group: neighbouring inputs that share a scale.
    """
    return Encoding(kind.upper(), WeightFormat(_KINDS[kind][0], group, _SINGLE, rounds_rows=False))


class Int8Matrix:
    """Reads a matrix of LLM.int8; see `StoredMatrix`."""

    encoding = _INT8

    def __init__(self, weights: SafetensorsWeights, owner: str):
        self._weights = weights
        check_part(weights, owner + _WEIGHT, None, (np.int8,))
        self.shape = weights.shape(owner + _WEIGHT)
        found = weights.shape(owner + _SCB)
        check_part(weights, owner + _SCB, found if found == (self.shape[0], 1) else (self.shape[0],), (np.float32,))
        order = owner + ".weight_format"
        self.parts = (owner + _WEIGHT, owner + _SCB, *([order] if order in weights.names() else []))
        # 0 = rows as they are; other numbers are orders for some GPUs' instructions.
        if len(self.parts) == 3 and weights.read_codes(order).any():
            raise ValueError(f"{weights.file_of(order)}: {order} says that codes are reordered, which is not read")

    def read(self) -> StoredCodes:
        codes, largest = (self._weights.read_codes(part) for part in self.parts[:2])
        assert _INT8.format is not None
        return StoredCodes(codes, largest.reshape(-1, 1) / np.float32(127), None, _INT8.format)


class FourBitMatrix:
    """Reads a matrix of 4 bits; see `StoredMatrix`."""

    def __init__(self, weights: SafetensorsWeights, owner: str):
        self._weights, self._owner = weights, owner
        there = weights.names()
        kind = next((one for one in _KINDS if owner + _STATE + one in there), None)
        codes = owner + _WEIGHT
        if kind is None:
            raise ValueError(f"{weights.file_of(codes)} has {codes}, but there is no {owner}{_STATE}nf4 or fp4")
        state = owner + _STATE + kind
        self._said = self._read_state(state)
        outputs, inputs = self.shape = self._said["shape"]
        self._block = self._said["blocksize"]
        blocks = -(-outputs * inputs // self._block)
        size = outputs * inputs // 2
        found = weights.shape(codes)
        check_part(weights, codes, found if found in ((size, 1), (1, size)) else (size, 1), (np.uint8,))
        check_part(weights, owner + _MAP, (16,), (np.float32,))
        if not np.allclose(weights.read_codes(owner + _MAP), _KINDS[kind][1], rtol=1e-6):
            raise ValueError(f"{weights.file_of(codes)}: {owner + _MAP} has other numbers than {kind} has")
        self._nested = owner + _NESTED in there
        check_part(weights, owner + _ABSMAX, (blocks,), (np.uint8,) if self._nested else FLOATS)
        nested = []
        if self._nested:
            nested = [owner + _NESTED, owner + _NESTED_MAP]
            if nested[1] not in there:
                raise ValueError(f"{weights.file_of(codes)} has {nested[0]}, but there is no {nested[1]}")
            size = self._said.get("nested_blocksize")
            if not is_size(size):
                raise ValueError(f"{weights.file_of(state)}: {state} has nested_blocksize={shown(size)}")
            offset = self._said.setdefault("nested_offset", 0.0)
            if not isinstance(offset, (int, float)) or isinstance(offset, bool) or not math.isfinite(offset):
                raise ValueError(f"{weights.file_of(state)}: {state} has nested_offset={shown(offset)}")
            check_part(weights, nested[0], (-(-blocks // size),), (np.float32,))
            check_part(weights, nested[1], (256,), (np.float32,))
        self.parts = (codes, owner + _ABSMAX, owner + _MAP, state, *nested)
        # A run of values may end inside a row.
        self.encoding = four_bit_encoding(kind, math.gcd(self._block, inputs))

    def read(self) -> StoredCodes:
        (outputs, inputs), form = self.shape, self.encoding.format
        assert form is not None
        packed = self._weights.read_codes(self.parts[0]).reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(self.shape)
        starts = np.arange(0, outputs * inputs, form.group) // self._block
        return StoredCodes(codes, self._scales()[starts].reshape(outputs, -1), None, form)

    def _scales(self) -> np.ndarray:
        """Return what multiplies each run, float32."""
        stored = self._weights.read_codes(self._owner + _ABSMAX)
        if not self._nested:
            return stored.astype(np.float32)
        numbers = self._weights.read_codes(self._owner + _NESTED_MAP)[stored]
        runs = np.arange(len(stored)) // self._said["nested_blocksize"]
        offset = np.float32(self._said["nested_offset"])
        scales: np.ndarray = numbers * self._weights.read_codes(self._owner + _NESTED)[runs] + offset
        return scales

    def _read_state(self, name: str) -> dict[str, Any]:
        where = f"{self._weights.file_of(name)}: {name}"
        if len(self._weights.shape(name)) != 1:
            raise ValueError(f"{where} has shape {self._weights.shape(name)}, and is a text in bytes")
        try:
            said = json.loads(self._weights.read_codes(name).tobytes())
            shape, block = tuple(said["shape"]), said["blocksize"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where} is no JSON with shape and blocksize: {error!r}") from error
        sizes = [*shape, block]
        if len(shape) != 2 or not all(map(is_size, sizes)) or math.prod(shape) % 2:
            raise ValueError(f"{where} has shape={shown(shape)}, blocksize={shown(block)}")
        return {**said, "shape": shape}
